"""Rewrite a tiny checkpoint's weight files and config into the layouts that checkpoints on the hub have."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

INDEX = "model.safetensors.index.json"
Change = Callable[[str, torch.Tensor], tuple[str, torch.Tensor]]


def rewrite(folder: Path, change: Change) -> Path:
    """Rename and reshape the weights, shard by shard; the index follows."""
    places: dict[str, str] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        weights = dict(change(name, weight) for name, weight in load_file(file).items())
        save_file(weights, file, metadata={"format": "pt"})
        places |= dict.fromkeys(weights, file.name)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def edit_config(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    content = json.loads((folder / "config.json").read_text())
    change(content)
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def experts_transposed(name: str, weight: torch.Tensor) -> tuple[str, torch.Tensor]:
    """[experts, out, in] -> [experts, in, out], as the hub's mixture-of-experts checkpoints hold them."""
    return name, weight.transpose(1, 2).contiguous() if ".mlp.experts." in name else weight


def tower_nested(name: str, weight: torch.Tensor) -> tuple[str, torch.Tensor]:
    """With the level that SigLIP towers had below `vision_tower`."""
    return name.replace("vision_tower.", "vision_tower.vision_model.", 1), weight


def without_prefix(name: str, weight: torch.Tensor) -> tuple[str, torch.Tensor]:
    """As the model below the head saves itself."""
    return name.removeprefix("model."), weight


def vision_without_prefix(name: str, weight: torch.Tensor) -> tuple[str, torch.Tensor]:
    return name.replace("model.visual.", "visual.", 1), weight


def older_config(config: dict[str, Any]) -> None:
    """The rotary and expert keys of the hub's files, `torch_dtype`, the vision part under the family's own name."""
    text, vision = config["text_config"], config["vision_config"]
    rope = text.pop("rope_parameters")
    text["rope_theta"] = rope.pop("rope_theta")
    if "mrope_section" in rope:
        text["rope_scaling"] = rope
        vision["model_type"] = config["model_type"]
    if "num_local_experts" in text:
        text["num_experts"] = text.pop("num_local_experts")
    for part in (config, text, vision):
        part.pop("tie_word_embeddings" if part is not config else "transformers_version", None)
        if "dtype" in part:
            part["torch_dtype"] = part.pop("dtype")
