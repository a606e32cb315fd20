"""Merge a LoRA adapter into the weights that a stage owns; what belongs to other stages is left to them."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from deepstack_serving.errors import CheckpointError
from deepstack_serving.lora import LoraAdapter


class Absent(nn.Identity):
    """Stands where a module of another stage would be, so that weight names keep their layer numbers."""


@torch.no_grad()
def merge_adapter(model: Any, adapter: LoraAdapter) -> None:
    """Add each delta in float32 to the linear layer it names, in the weight's own number type.

    Raises CheckpointError for names that are no linear layer of the model, and for shapes that do not fit.
    """
    for name in adapter.modules:
        target = _target(model, name, adapter)
        if isinstance(target, Absent):
            continue
        if target is getattr(model, "lm_head", None) and getattr(model.config, "tie_word_embeddings", False):
            raise CheckpointError(
                f"{adapter.files[1]}: {name!r} cannot be merged: tie_word_embeddings is True in config.json, so it is "
                "the embedding as well"
            )
        delta = adapter.delta(name)
        if delta.shape != target.weight.shape:
            raise CheckpointError(
                f"{adapter.files[1]}: {name!r} adds {list(delta.shape)} to a weight of {list(target.weight.shape)}"
            )
        merged = target.weight.float() + delta.to(target.weight.device)
        target.weight = nn.Parameter(merged.to(target.weight.dtype), requires_grad=False)


def _target(model: Any, name: str, adapter: LoraAdapter) -> nn.Linear | Absent:
    for path in (name, f"{model.base_model_prefix}.{name}"):  # as in weight files, the model's prefix may be left out
        module: nn.Module | None = model
        for part in path.split("."):
            if module is None or isinstance(module, Absent):
                break
            module = cast("nn.Module | None", getattr(module, "_modules", {}).get(part))
        if isinstance(module, nn.Linear | Absent):
            return module
    raise CheckpointError(f"{adapter.files[1]}: {name!r} is no linear layer of this model")
