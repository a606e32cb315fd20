"""The deepstack features of a step, as the layers of a stage take them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from deepstack_serving.execution.slots import Scattered
from deepstack_serving.injection import add_features


@dataclass(frozen=True)
class StepFeatures:
    """The deepstack features of one step: feature row `sources[i]` of each tensor belongs to packed row `rows[i]`."""

    tensors: Mapping[int, torch.Tensor]  # by decoder layer, [feature rows, width]
    rows: torch.Tensor
    sources: torch.Tensor

    def add(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """An Inject."""
        return add_features(hidden, self.rows, self.tensors[layer], self.sources)

    def scattered(self, layer: int, rows: int) -> Scattered:
        """[rows, width] for a slot, zero where a row has no feature."""
        return Scattered(self.tensors[layer], self.rows, self.sources, rows)
