"""The decoder layers of a stage, run one after another with their deepstack features between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from deepstack_serving.families.base import Family
from deepstack_serving.injection import InjectionPoint, StagePlan

Inject = Callable[[int, torch.Tensor], torch.Tensor]  # (layer, hidden [rows, width]) -> hidden with its features added


class LayerFunction(Protocol):
    """One decoder layer. `packed` is what the registered attention takes."""

    def __call__(self, layer: int, hidden: torch.Tensor, rotary: Any, packed: Any) -> torch.Tensor:
        """hidden [1, rows, width] -> [1, rows, width]."""


@dataclass(frozen=True)
class LayerFunctions:
    """Compiled stand-ins for a layer and for the rotary embedding."""

    layer: LayerFunction
    rotary: Callable[[torch.Tensor, torch.Tensor], Any]


@dataclass(frozen=True)
class DecoderLayers:
    """A stage's own layers of a loaded model."""

    family: Family
    model: nn.Module
    plan: StagePlan

    def call(self, layer: int, hidden: torch.Tensor, rotary: Any, packed: Any) -> torch.Tensor:
        """transformers' own layer: the plain LayerFunction."""
        module = self.family.text_model(self.model).layers[layer]
        output: torch.Tensor = module(hidden, position_embeddings=rotary, attention_mask=None, packed=packed)
        return output

    def rotary(self, hidden: torch.Tensor, position_ids: torch.Tensor) -> Any:
        """What a layer takes as its positions, from hidden [1, rows, width] and position_ids [axes, 1, rows]."""
        return self.family.rotary(self.model, hidden, position_ids)

    def run(
        self,
        hidden: torch.Tensor,
        position_ids: torch.Tensor,
        packed: Callable[[int], Any],
        inject: Inject | None,
        functions: LayerFunctions | None = None,
        after: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        """hidden [rows, width] through all layers; position_ids [axes, rows]; `inject` None: no row has features.

        `after` is called behind each layer with the number of layers that are done.
        """
        call, rotate = (functions.layer, functions.rotary) if functions else (self.call, self.rotary)
        rotary = rotate(hidden[None], position_ids[:, None])
        before = self.family.injection is InjectionPoint.BEFORE_LAYER
        for layer in range(self.plan.first_layer, self.plan.end_layer):
            injects = inject is not None and layer in self.plan.injected
            if inject is not None and injects and before:
                hidden = inject(layer, hidden)
            hidden = call(layer, hidden[None], rotary, packed(layer))[0]
            if inject is not None and injects and not before:
                hidden = inject(layer, hidden)
            if after is not None:
                after(layer - self.plan.first_layer + 1)
        return hidden
