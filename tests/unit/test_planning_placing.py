"""Where models are placed, and that a suggested split is the best of all."""

from __future__ import annotations

from itertools import combinations

import pytest

from deepstack_serving.errors import SettingsError
from deepstack_serving.planning.placing import Placement, place, suggest_split
from deepstack_serving.planning.sizes import Parts

PARTS = Parts(vision=25, first=12, last=13, every=1, layers=(10, 10, 10, 7, 10, 10, 10, 30, 10, 10))


def fullest(points: tuple[int, ...], placement: Placement, memory: list[float]) -> float:
    """The largest share of a GPU's memory, added up model by model."""
    loads = [0.0] * len(memory)
    loads[placement.vision] += PARTS.vision
    borders = [0, *points, len(PARTS.layers)]
    for index, gpu in enumerate(placement.stages):
        loads[gpu] += PARTS.every + sum(PARTS.layers[borders[index] : borders[index + 1]])
    loads[placement.stages[0]] += PARTS.first
    loads[placement.stages[-1]] += PARTS.last
    return max(load / size for load, size in zip(loads, memory, strict=True))


@pytest.mark.parametrize(
    ("stages", "gpus", "vision", "placed"),
    [
        (1, 1, 0, (0,)),
        (2, 1, 0, (0, 0)),
        (2, 2, 0, (0, 1)),
        (2, 3, 0, (1, 2)),
        (4, 2, 0, (0, 0, 1, 1)),
        (4, 3, 0, (0, 0, 1, 2)),
    ],
)
def test_stages_are_placed_in_order(stages: int, gpus: int, vision: int, placed: tuple[int, ...]) -> None:
    assert place(stages, gpus) == Placement(vision, placed)


@pytest.mark.parametrize("gpus", [0, 4])
def test_gpus_without_a_model_are_refused(gpus: int) -> None:
    with pytest.raises(SettingsError, match="allowed for 2 language stages: 1 to 3"):
        place(2, gpus)


@pytest.mark.parametrize("memory", [[1, 1], [1, 2], [3, 1], [1, 1, 1], [2, 1, 3], [1, 1, 2, 2]])
def test_suggested_split_is_the_best_of_all(memory: list[float]) -> None:
    placement = place(len(memory), len(memory))
    every = combinations(range(1, len(PARTS.layers)), len(memory) - 1)
    suggested = suggest_split(PARTS, placement, memory)
    assert fullest(suggested, placement, memory) == min(fullest(points, placement, memory) for points in every)


def test_vision_encoder_on_the_same_gpu_moves_the_split() -> None:
    shared = suggest_split(PARTS, Placement(0, (0, 1)), [1, 1])
    alone = suggest_split(PARTS, Placement(0, (1, 2)), [1, 1, 1])
    assert shared < alone


def test_stages_on_one_gpu_share_its_layers() -> None:
    assert suggest_split(PARTS, Placement(0, (0, 0)), [1]) == (5,)


def test_a_single_stage_has_no_split() -> None:
    assert suggest_split(PARTS, Placement(0, (0,)), [1]) == ()


def test_more_stages_than_layers_leave_some_empty() -> None:
    parts = Parts(0, 0, 0, 0, (1, 1))
    points = suggest_split(parts, place(4, 4), [1] * 4)
    assert len(points) == 3
    assert list(points) == sorted(points)
