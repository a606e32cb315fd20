"""The model families that can be served, by the model_type of their config.json."""

from __future__ import annotations

from typing import Any

from deepstack_serving.errors import CheckpointError
from deepstack_serving.families.base import Family
from deepstack_serving.families.granite4_vision import Granite4Vision
from deepstack_serving.families.qwen3_vl import Qwen3VL

FAMILIES: dict[str, Family] = {family.model_type: family for family in (Qwen3VL(), Granite4Vision())}


def family_of(config: Any) -> Family:
    """The family of a transformers config. Raises CheckpointError naming the supported ones."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise CheckpointError(f"model_type {config.model_type!r} is not supported; supported: {', '.join(FAMILIES)}")
    return family
