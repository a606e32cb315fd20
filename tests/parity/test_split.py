"""Wherever the layers are cut, the answers are those of the uncut model, to the last bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.asking import MIXED
from tests.support.runs import Run, run, run_staggered

LAYERS = {"qwen3_vl": 6, "qwen3_vl_moe": 6, "granite4_vision": 8}
SPLITS = [(family, 2, str(layer)) for family, count in LAYERS.items() for layer in range(count + 1)]
BALANCED = [(family, 4, "balanced") for family in LAYERS]
UNEVEN = [(family, 4, points) for family in LAYERS for points in ("0,1,1", "1,2,6")]
COLUMNS = ("checkpoint", "stages", "points")


@pytest.mark.parametrize(COLUMNS, SPLITS + BALANCED + UNEVEN, indirect=["checkpoint"], scope="session")
def test_split_equals_unsplit(checkpoint: Path, unsplit: Run, stages: int, points: str) -> None:
    assert run(checkpoint, stages, split_points=points) == unsplit


@pytest.mark.parametrize("budget", [7, 17])
def test_split_equals_unsplit_in_chunks(checkpoint: Path, budget: int) -> None:
    one, two = (run(checkpoint, stages, prefill_token_budget=budget) for stages in (1, 2))
    assert one == two


def test_answers_without_the_encoders_cache_are_the_same(checkpoint: Path, unsplit: Run) -> None:
    assert run(checkpoint, vision_cache_bytes=0) == unsplit


def test_split_equals_unsplit_with_staggered_arrivals(checkpoint: Path) -> None:
    one, four = (run_staggered(checkpoint, MIXED, stages) for stages in (1, 4))
    assert one == four


@pytest.fixture(scope="module")
def unsplit_bf16(bf16_checkpoint: Path) -> Run:
    return run(bf16_checkpoint, stages=1)


@pytest.mark.parametrize(
    ("bf16_checkpoint", *COLUMNS[1:]), SPLITS + BALANCED, indirect=["bf16_checkpoint"], scope="session"
)
def test_split_equals_unsplit_in_bfloat16(bf16_checkpoint: Path, unsplit_bf16: Run, stages: int, points: str) -> None:
    assert run(bf16_checkpoint, stages, split_points=points) == unsplit_bf16
