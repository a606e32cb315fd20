"""Where each family's demo checkpoint is; without any import that takes time."""

from __future__ import annotations

from pathlib import Path

CHECKPOINTS = {
    family: Path(__file__).with_name("checkpoints") / name
    for family, name in (("qwen", "qwen3_vl_digits"), ("granite", "granite4_vision_digits"))
}
DEFAULT_FAMILY = "qwen"
