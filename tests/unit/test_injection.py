"""Which deepstack tensor goes to which stage, split points that do not fit, and the add at explicit rows."""

from __future__ import annotations

import pytest
import torch

from deepstack_serving.errors import CheckpointError, SettingsError
from deepstack_serving.injection import add_features, plan_stages

DEEPSTACK = (0, 1, 2)


def test_balanced_split_divides_the_layers() -> None:
    plans = plan_stages(10, 4, None, DEEPSTACK)
    assert [(plan.first_layer, plan.end_layer) for plan in plans] == [(0, 2), (2, 5), (5, 7), (7, 10)]


def test_first_and_last_are_one_stage_each() -> None:
    plans = plan_stages(6, 3, None, DEEPSTACK)
    assert [(plan.is_first, plan.is_last) for plan in plans] == [(True, False), (False, False), (False, True)]


@pytest.mark.parametrize("point", range(7))
def test_each_tensor_is_injected_exactly_once(point: int) -> None:
    plans = plan_stages(6, 2, [point], (0, 3, 5))
    assert [layer for plan in plans for layer in plan.injected] == [0, 3, 5]


@pytest.mark.parametrize("point", range(7))
def test_what_a_stage_forwards_is_what_the_next_receives(point: int) -> None:
    early, late = plan_stages(6, 2, [point], (0, 3, 5))
    assert early.forwarded == late.received
    assert early.received == (0, 3, 5)


def test_stage_after_the_last_deepstack_layer_receives_nothing() -> None:
    assert plan_stages(6, 2, [3], DEEPSTACK)[1].received == ()


def test_unordered_deepstack_layers_are_sorted() -> None:
    assert plan_stages(6, 1, [], (5, 0, 3))[0].received == (0, 3, 5)


@pytest.mark.parametrize("points", [[], [1, 2]])
def test_wrong_number_of_split_points_is_refused(points: list[int]) -> None:
    with pytest.raises(SettingsError, match=r"'split_points' has \d points .* 2 language stages need 1"):
        plan_stages(6, 2, points, DEEPSTACK)


def test_split_point_behind_the_last_layer_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"\[7\].* 6 layers; allowed: 0 to 6"):
        plan_stages(6, 2, [7], DEEPSTACK)


def test_two_features_for_one_layer_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"same decoder layer: \[0, 3, 3\]"):
        plan_stages(6, 2, [3], (0, 3, 3))


@pytest.mark.parametrize("layer", [-1, 6])
def test_feature_for_a_layer_that_is_not_there_is_refused(layer: int) -> None:
    with pytest.raises(CheckpointError, match=r"there are 6 layers"):
        plan_stages(6, 2, [3], (0, layer))


def test_features_are_added_at_their_rows_only() -> None:
    hidden, features = torch.zeros(4, 2), torch.tensor([[1.0, 2], [3, 4], [5, 6]])
    result = add_features(hidden, torch.tensor([3, 1]), features, torch.tensor([2, 0]))
    assert result.tolist() == [[0, 0], [1, 2], [0, 0], [5, 6]]


def test_adding_features_leaves_its_inputs_alone() -> None:
    hidden, features = torch.ones(2, 2), torch.ones(1, 2)
    add_features(hidden, torch.tensor([0]), features, torch.tensor([0]))
    assert hidden.tolist() == [[1, 1], [1, 1]]
