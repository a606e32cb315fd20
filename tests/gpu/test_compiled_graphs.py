"""Compiled layers on the GPU: the same code eagerly and in graphs, and what plain layers say but for rounding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.asking import MIXED, Answer, ask_alone
from tests.support.gpu_servers import both, largest_difference, served

COMPILED_TOLERANCE = 0.15  # in log-probability, of bfloat16
FULL_PRECISION = 5e-3  # in log-probability, of float32
MORE_ROUNDING = 3.0  # than plain layers: bfloat16 moves a tiny model's log-probabilities by 0.05 to 0.3


def firsts_apart(mine: list[Answer], theirs: list[Answer]) -> float:
    """The largest difference between alternatives of first tokens."""
    firsts = ([replace(answer, top=answer.top[:1]) for answer in answers] for answers in (mine, theirs))
    return max(one.top_distance(other) for one, other in zip(*firsts, strict=True))


@pytest.mark.parametrize("layers", ["layers", "autotune"])
def test_compiled_layers_agree_with_plain_ones(bf16_checkpoint: Path, layers: str) -> None:
    with served(bf16_checkpoint, "graph", layers=layers) as compiled, served(bf16_checkpoint, "eager") as plain:
        assert firsts_apart(ask_alone(compiled, MIXED), ask_alone(plain, MIXED)) < COMPILED_TOLERANCE


@pytest.mark.parametrize("layers", ["layers", "autotune"])
def test_compiled_layers_agree_with_plain_ones_in_full_precision(checkpoint: Path, layers: str) -> None:
    with served(checkpoint, "graph", layers=layers) as compiled, served(checkpoint, "eager") as plain:
        assert largest_difference(ask_alone(compiled, MIXED), ask_alone(plain, MIXED)) < FULL_PRECISION


@pytest.mark.parametrize("layers", ["layers", "autotune"])
def test_compiled_layers_round_little_more_than_plain_ones(bf16_checkpoint: Path, layers: str) -> None:
    answers = []
    ways = (("graph", layers, "auto"), ("eager", "off", "auto"), ("eager", "off", "float32"))
    for execution, compiled, dtype in ways:
        with served(bf16_checkpoint, execution, layers=compiled, dtype=dtype) as server:
            answers.append(ask_alone(server, MIXED))
    mine, plain, exact = answers
    assert firsts_apart(mine, exact) < MORE_ROUNDING * firsts_apart(plain, exact)


def test_compiled_replays_equal_compiled_eager_steps(bf16_checkpoint: Path) -> None:
    with both(bf16_checkpoint, layers="layers") as (graphs, eager):
        assert largest_difference(ask_alone(graphs, MIXED), ask_alone(eager, MIXED)) == 0
