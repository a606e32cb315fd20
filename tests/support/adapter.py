"""Write LoRA adapters into checkpoint folders, and merge them by hand."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
RANK, ALPHA = 4, 6
VALUES: dict[str, object] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": "somewhere/else",
    "bias": "none",
    "inference_mode": True,
    "init_lora_weights": True,
    "lora_alpha": ALPHA,
    "lora_dropout": 0.1,
    "modules_to_save": None,
    "r": RANK,
    "target_modules": ["q_proj", "down_proj"],
    "use_dora": False,
    "use_rslora": False,
}


def write_adapter(
    folder: Path, modules: Iterable[str], ranks: Mapping[str, int] | None = None, /, **values: object
) -> Path:
    """An adapter for these modules of the checkpoint in `folder`; `ranks` differ from RANK for some of them."""
    generator = torch.Generator().manual_seed(0)
    shapes = {name: weight.shape for name, weight in weights_of(folder).items()}
    tensors = {}
    for module in modules:
        rank = (ranks or {}).get(module, RANK)
        wide, narrow = shapes[f"{module}.weight"]
        for part, shape in (("A", (rank, narrow)), ("B", (wide, rank))):
            tensors[f"base_model.model.{module}.lora_{part}.weight"] = torch.randn(shape, generator=generator) * 0.3
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps({**VALUES, **values}))
    return folder


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """All weights of the checkpoint, without the adapter's."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        found |= load_file(file)
    return found


def merge_by_hand(folder: Path, scales: Mapping[str, float] | None = None) -> None:
    """Replace the weights by those that the adapter makes of them, in numpy and float32, and remove the adapter.

    `scales` are those of modules where it is not alpha / r.
    """
    adapter = load_file(folder / WEIGHTS)
    for file in folder.glob("model*.safetensors"):
        weights = load_file(file)
        for name, weight in weights.items():
            module = name.removesuffix(".weight")
            down, up = (adapter.get(f"base_model.model.{module}.lora_{part}.weight") for part in "AB")
            if down is not None and up is not None:
                scale = (scales or {}).get(module, ALPHA / RANK)
                delta = np.matmul(up.numpy(), down.numpy()) * np.float32(scale)
                weights[name] = (weight.float() + torch.from_numpy(delta)).to(weight.dtype)
        save_file(weights, file, metadata={"format": "pt"})
    for name in (CONFIG, WEIGHTS):
        (folder / name).unlink()
