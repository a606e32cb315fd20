"""The control of an evaluation: a copy of a checkpoint whose features under test are zero in every picture.

Qwen3-VL: all deepstack features. Granite: those that cross the border between the two stages of the default split;
the others stay as they are. The last layer of what makes them is set to zero, so the encoder computes and sends
features, and they are zero. Nothing in the server changes.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from demo.architectures import architecture_of


def zeroed_copy(checkpoint: Path, target: Path) -> Path:
    """Write the copy to `target` and return it. Raises ValueError when nothing in the checkpoint makes features."""
    shutil.copytree(checkpoint, target)
    weights = load_file(target / "model.safetensors")
    config = json.loads((target / "config.json").read_text())
    names = architecture_of(checkpoint).feature_outputs(config, weights)
    if not names:
        raise ValueError(f"{checkpoint} has no weights that make deepstack features")
    zeros = {name: torch.zeros_like(weights[name]) for name in names}
    save_file({**weights, **zeros}, target / "model.safetensors", metadata={"format": "pt"})
    return target
