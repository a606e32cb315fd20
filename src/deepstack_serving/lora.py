"""A LoRA adapter in a checkpoint folder: its config, checked key by key, and what it adds to the weight of a module.

The two files are read here and nowhere else, so whether the package `peft` is installed changes nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from deepstack_serving.errors import CheckpointError
from deepstack_serving.files import read_object, tensor_names

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_KEY = re.compile(r"base_model\.model\.(.+)\.lora_([AB])(?:\.default)?\.weight")
_USED = {"r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"}
# How the adapter was made or found, which its weights already hold.
_HARMLESS = {
    *("auto_mapping", "base_model_name_or_path", "exclude_modules", "inference_mode", "layers_pattern"),
    *("layers_to_transform", "lora_dropout", "megatron_core", "peft_version", "qalora_group_size", "revision"),
    *("target_modules", "task_type"),
}
# Other keys must be absent or empty, or hold one of these; `init_lora_weights` may change the base weights as well.
_ALLOWED: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal"),
}


@dataclass(frozen=True)
class LoraAdapter:
    """A checked adapter. Patterns are those of peft: they match the end of a module's name."""

    folder: Path
    rank: float
    alpha: float
    is_rank_stabilised: bool
    rank_pattern: Mapping[str, float]
    alpha_pattern: Mapping[str, float]

    @property
    def files(self) -> tuple[Path, Path]:
        return self.folder / CONFIG, self.folder / WEIGHTS

    @cached_property
    def modules(self) -> dict[str, dict[str, str]]:
        """The keys of A and B by the module that they belong to. Raises CheckpointError for any other key."""
        found: dict[str, dict[str, str]] = {}
        for key in tensor_names(self.files[1]):
            match = _KEY.fullmatch(key)
            if match is None:
                raise CheckpointError(f"{self.files[1]}: the key {key!r} is not served; served are lora_A and lora_B")
            found.setdefault(match[1], {})[match[2]] = key
        for module, keys in found.items():
            if keys.keys() != {"A", "B"}:
                raise CheckpointError(f"{self.files[1]}: {module!r} has lora_{min(keys)} only")
        return found

    def delta(self, module: str) -> torch.Tensor:
        """What is added to the module's weight: B @ A times the scale, float32 [out, in]."""
        with safe_open(self.files[1], "pt") as weights:
            down, up = (weights.get_tensor(self.modules[module][part]).float() for part in "AB")
        rank = _matching(self.rank_pattern, module, self.rank)
        if down.ndim != 2 or up.ndim != 2 or not len(down) == up.shape[1] == rank:
            raise CheckpointError(
                f"{self.files[1]}: lora_A and lora_B of {module!r} are {list(down.shape)} and {list(up.shape)}, but "
                f"{CONFIG} has the rank {rank}"
            )
        alpha = _matching(self.alpha_pattern, module, self.alpha)
        scale = alpha / (math.sqrt(rank) if self.is_rank_stabilised else rank)
        return torch.mul(up @ down, scale)


def open_adapter(folder: Path) -> LoraAdapter:
    """Raises CheckpointError naming the first key of adapter_config.json, and its value, that is not served."""
    path = folder / CONFIG
    config = read_object(path)
    for key, value in config.items():
        if key not in _USED | _HARMLESS and not _is_served(key, value):
            allowed = " or ".join(map(repr, _ALLOWED[key])) if key in _ALLOWED else "nothing"
            raise CheckpointError(f"{path}: {key} is {value!r}, which is not served; served is {allowed}")
    if "peft_type" not in config:
        raise CheckpointError(f"{path}: peft_type is missing; served is 'LORA'")
    for key in ("r", "lora_alpha"):
        if not _is_positive(config.get(key)):
            raise CheckpointError(f"{path}: {key} is {config.get(key)!r}; it must be a number above 0")
    if not (folder / WEIGHTS).is_file():
        raise CheckpointError(f"{path}: {WEIGHTS} is not beside it; only safetensors weights are served")
    patterns = [_pattern(path, key, config.get(key) or {}) for key in ("rank_pattern", "alpha_pattern")]
    adapter = LoraAdapter(folder, config["r"], config["lora_alpha"], bool(config.get("use_rslora")), *patterns)
    _ = adapter.modules  # refuses keys that are not served
    return adapter


def _is_served(key: str, value: object) -> bool:
    return value in _ALLOWED[key] if key in _ALLOWED else not value


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _pattern(path: Path, key: str, pattern: Any) -> Mapping[str, float]:
    if not isinstance(pattern, dict) or not all(map(_is_positive, pattern.values())):
        raise CheckpointError(f"{path}: {key} is {pattern!r}; it must hold a number above 0 for each name")
    return pattern


def _matching(pattern: Mapping[str, float], module: str, default: float) -> float:
    found = (value for key, value in pattern.items() if re.match(rf"(.*\.)?({key})$", module))
    return next(found, default)
