"""The shapes that are measured: configs of real checkpoints, and a tiny one that a test can serve on a CPU."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bench.serving import PROJECT

_CONFIGS = PROJECT / "tests" / "data" / "configs"
_QWEN_SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>"),
    *("<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>"),
)
_GRANITE_SPECIAL = ("<|unk|>", "<|end_of_text|>", "<|pad|>", "<|start_of_role|>", "<|end_of_role|>", "<image>")


@dataclass(frozen=True)
class Format:
    """A family's special tokens in the order of their ids, and which config entry holds the id of which.

    `template` is the demo checkpoint whose chat template and processor files the family's random checkpoints take over.
    """

    special: tuple[str, ...]
    end: str
    padding: str
    image: str
    config_ids: Mapping[str, str]
    template: str


QWEN = Format(
    _QWEN_SPECIAL,
    "<|im_end|>",
    "<|endoftext|>",
    "<|image_pad|>",
    {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    },
    "qwen3_vl_digits",
)
GRANITE = Format(
    _GRANITE_SPECIAL,
    "<|end_of_text|>",
    "<|pad|>",
    "<image>",
    {"image_token_index": "<image>"},
    "granite4_vision_digits",
)


@dataclass(frozen=True)
class Shape:
    """`config` is config.json; ids below `vocabulary` are tokens of the tokenizer, the last of them special.

    A picture of `image_side_px` squared takes `image_tokens` tokens; None where that is not known beforehand.
    """

    name: str
    title: str
    config: Mapping[str, Any]
    form: Format
    vocabulary: int
    image_side_px: int
    image_tokens: int | None


def shape(name: str) -> Shape:
    """A shape by its name, one of SHAPES. Raises KeyError for another."""
    return _tiny() if name == TINY else _real(name, *_REAL[name])


def _real(name: str, title: str, folder: str, form: Format, vocabulary: int, image_tokens: int | None) -> Shape:
    config = json.loads((_CONFIGS / folder / "config.json").read_text())
    return Shape(name, title, config, form, vocabulary, 1024, image_tokens)


def _tiny() -> Shape:
    """The smallest real shape with a few narrow layers: everything is exercised, nothing is worth measuring."""
    config = copy.deepcopy(dict(shape("2b").config))
    config["text_config"] |= {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 2048,
        "max_position_embeddings": 4096,
    }
    config["vision_config"] |= {
        "depth": 4,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "out_hidden_size": 128,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1, 2],
    }
    return Shape(TINY, "tiny", config, QWEN, 2014, 256, 64)


TINY = "tiny"
_QWEN_TOKENS = 151_643 + len(_QWEN_SPECIAL)  # the special tokens have the ids of the real tokenizer
_REAL: dict[str, tuple[str, str, Format, int, int | None]] = {
    "2b": ("Qwen3-VL-2B", "qwen3_vl_2b", QWEN, _QWEN_TOKENS, 1024),
    "8b": ("Qwen3-VL-8B", "qwen3_vl_8b", QWEN, _QWEN_TOKENS, 1024),
    "30b-a3b": ("Qwen3-VL-30B-A3B", "qwen3_vl_30b_a3b", QWEN, _QWEN_TOKENS, 1024),
    "granite-4b": ("Granite Vision 4.1 4B", "granite_vision_4_1_4b", GRANITE, 100_353, None),
}
SHAPES = (*_REAL, TINY)
