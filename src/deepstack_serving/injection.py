"""Which deepstack features belong to which decoder layer, hence to which language stage, and the add itself.

A feature tensor is named by the decoder layer that it belongs to: `ds_<layer>`. A stage receives the tensors of its own
layers and of all later ones, adds its own, and forwards the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

import torch

from deepstack_serving.errors import CheckpointError, SettingsError


class InjectionPoint(StrEnum):
    """Where a decoder layer's features are added to the hidden states."""

    BEFORE_LAYER = "before"
    AFTER_LAYER = "after"


@dataclass(frozen=True)
class StagePlan:
    """The layers [first_layer, end_layer) of one language stage and the deepstack layers it handles."""

    index: int
    count: int
    first_layer: int
    end_layer: int
    received: tuple[int, ...]

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    @property
    def injected(self) -> tuple[int, ...]:
        return tuple(layer for layer in self.received if layer < self.end_layer)

    @property
    def forwarded(self) -> tuple[int, ...]:
        return tuple(layer for layer in self.received if layer >= self.end_layer)


def plan_stages(
    layer_count: int, stage_count: int, split_points: Sequence[int] | None, deepstack_layers: Sequence[int]
) -> tuple[StagePlan, ...]:
    """One plan per language stage. `split_points` None balances by layers.

    Raises SettingsError for split points that do not fit, CheckpointError for deepstack layers that do not.
    """
    check_deepstack_layers(deepstack_layers, layer_count)
    if split_points is None:
        split_points = [layer_count * index // stage_count for index in range(1, stage_count)]
    if len(split_points) != stage_count - 1:
        raise SettingsError(
            f"setting 'split_points' has {len(split_points)} points {list(split_points)}, but {stage_count} language "
            f"stages need {stage_count - 1}"
        )
    if any(point > layer_count for point in split_points):
        raise SettingsError(
            f"setting 'split_points' is {list(split_points)}, but the checkpoint has {layer_count} layers; "
            f"allowed: 0 to {layer_count}"
        )
    borders = [0, *split_points, layer_count]
    return tuple(
        StagePlan(index, stage_count, first, end, tuple(layer for layer in sorted(deepstack_layers) if layer >= first))
        for index, (first, end) in enumerate(pairwise(borders))
    )


def check_deepstack_layers(deepstack_layers: Sequence[int], layer_count: int) -> None:
    """Raises CheckpointError when two features target one layer, or one targets a layer that does not exist."""
    if len(set(deepstack_layers)) != len(deepstack_layers):
        raise CheckpointError(f"two deepstack features target the same decoder layer: {sorted(deepstack_layers)}")
    if any(not 0 <= layer < layer_count for layer in deepstack_layers):
        raise CheckpointError(
            f"deepstack features target decoder layers {sorted(deepstack_layers)}, but there are {layer_count} layers"
        )


def add_features(
    hidden: torch.Tensor, image_rows: torch.Tensor, features: torch.Tensor, feature_rows: torch.Tensor
) -> torch.Tensor:
    """hidden [tokens, width] plus features[feature_rows] at image_rows; both row tensors are [image tokens].

    `index_add` at explicit rows is deterministic and can be captured in a CUDA graph, unlike a boolean mask.
    """
    return hidden.index_add(0, image_rows, features.index_select(0, feature_rows))
