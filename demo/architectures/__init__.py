"""The demo checkpoints' architectures: a family's name, or a checkpoint folder, to what the demo has of it."""

from __future__ import annotations

import json
from pathlib import Path

from demo.architectures.base import Architecture
from demo.architectures.granite4_vision import Granite4Vision
from demo.architectures.qwen3_vl import Qwen3VL
from demo.folders import DEFAULT_FAMILY

ARCHITECTURES: dict[str, Architecture] = {known.family: known for known in (Qwen3VL(), Granite4Vision())}
DEFAULT = ARCHITECTURES[DEFAULT_FAMILY]


def architecture_of(checkpoint: Path) -> Architecture:
    """The one that the checkpoint's config.json names. Raises ValueError when the demo has none of that type."""
    model_type = json.loads((checkpoint / "config.json").read_text())["model_type"]
    known = {architecture.model_type: architecture for architecture in ARCHITECTURES.values()}
    if model_type not in known:
        raise ValueError(f"{checkpoint / 'config.json'}: model_type is {model_type!r}; known are {', '.join(known)}")
    return known[model_type]
