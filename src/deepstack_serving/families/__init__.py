"""The model families that can be served, by the model_type of their config.json."""

from __future__ import annotations

from deepstack_serving.errors import CheckpointError
from deepstack_serving.families.base import Family
from deepstack_serving.families.granite4_vision import Granite4Vision
from deepstack_serving.families.qwen3_vl import Qwen3VL
from deepstack_serving.families.qwen3_vl_moe import Qwen3VLMoe

FAMILIES: dict[str, Family] = {family.model_type: family for family in (Qwen3VL(), Qwen3VLMoe(), Granite4Vision())}


# Known to transformers and with deepstack features, but not served: why.
UNSERVED: dict[str, str] = {
    "qwen3_omni_moe": "it speaks and listens as well, and its vision and language model are parts of its thinker",
    "qwen3_omni_moe_thinker": "it listens as well: its positions and placeholders are not those of images alone",
    "cohere_compass": "its layers attend through sliding windows and have rotary positions of several kinds",
    "granite_docling": "its prompts number the tiles of a page between the image tokens",
}


def family_of(model_type: object) -> Family:
    """The family of a config's model_type. Raises CheckpointError naming the supported ones, or why it is not."""
    family = FAMILIES.get(str(model_type))
    if family is not None:
        return family
    reason = UNSERVED.get(str(model_type))
    state = f"known, but not served ({reason})" if reason else "not supported"
    raise CheckpointError(f"model_type {model_type!r} is {state}; supported: {', '.join(FAMILIES)}")
