"""Control arms: a lost feature moves the log-probabilities of image answers by far more than parity allows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deepstack_serving.wire import VISION_ENCODER
from tests.support.asking import Answer
from tests.support.local import STAGE_NAMES, Change, LocalPort, local_settings, zero_deepstack
from tests.support.runs import Run, run
from tests.support.stateless import feature_names

TEXT_ANSWER = 0
IMAGE_ANSWERS = (1, 2)


def zero_feature(wanted: str) -> Change:
    def change(model: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(tensor) if (model, name) == (VISION_ENCODER, wanted) else tensor

    return change


def first_token_shift(run_a: Run, run_b: Run, place: int) -> float:
    """How far the first token's distribution moved: later tokens follow from other texts."""
    first = [Answer((), run.together[place].logprobs[:1], run.together[place].top[:1]) for run in (run_a, run_b)]
    return first[0].top_distance(first[1])


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_zeroed_deepstack_changes_image_answers(checkpoint: Path, unsplit: Run, stages: int) -> None:
    zeroed = run(checkpoint, stages, zero_deepstack)
    assert min(first_token_shift(zeroed, unsplit, place) for place in IMAGE_ANSWERS) > 0.1


def test_every_feature_alone_changes_image_answers(checkpoint: Path, unsplit: Run) -> None:
    shifts = {}
    for feature in feature_names(LocalPort(local_settings(checkpoint), STAGE_NAMES[1])):
        zeroed = run(checkpoint, 2, zero_feature(feature))
        shifts[feature] = min(first_token_shift(zeroed, unsplit, place) for place in IMAGE_ANSWERS)
    assert {feature: shift for feature, shift in shifts.items() if shift <= 0.1} == {}


def test_zeroed_deepstack_leaves_text_alone(checkpoint: Path, unsplit: Run) -> None:
    zeroed = run(checkpoint, 2, zero_deepstack)
    assert zeroed.alone[TEXT_ANSWER] == unsplit.alone[TEXT_ANSWER]
