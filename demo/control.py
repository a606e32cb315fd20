"""The control of an evaluation: a copy of a checkpoint whose deepstack features are all zero.

The last layer of every deepstack merger is set to zero, so the encoder computes and sends features, and they are zero.
Nothing in the server changes.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

MERGER_OUTPUT = "deepstack_merger_list"
LAST_LAYER = "linear_fc2"


def zeroed_copy(checkpoint: Path, target: Path) -> Path:
    """Write the copy to `target` and return it. Raises ValueError when the checkpoint has no deepstack merger."""
    shutil.copytree(checkpoint, target)
    weights = load_file(target / "model.safetensors")
    names = [name for name in weights if MERGER_OUTPUT in name and LAST_LAYER in name]
    if not names:
        raise ValueError(f"{checkpoint} has no weights of a deepstack merger")
    zeros = {name: torch.zeros_like(weights[name]) for name in names}
    save_file({**weights, **zeros}, target / "model.safetensors", metadata={"format": "pt"})
    return target
