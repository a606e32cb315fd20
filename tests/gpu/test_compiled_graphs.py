"""Compiled layers on the GPU: the same code eagerly and in graphs, and little of what plain layers say is changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.asking import MIXED, ask_alone
from tests.support.gpu_servers import both, largest_difference, served

COMPILED_TOLERANCE = 0.15  # in log-probability, of bfloat16


@pytest.mark.parametrize("layers", ["layers", "autotune"])
def test_compiled_layers_agree_with_plain_ones(bf16_checkpoint: Path, layers: str) -> None:
    with served(bf16_checkpoint, "graph", layers=layers) as compiled, served(bf16_checkpoint, "eager") as plain:
        pairs = zip(ask_alone(compiled, MIXED), ask_alone(plain, MIXED), strict=True)
        firsts = [(dict(mine.top[0]), dict(theirs.top[0])) for mine, theirs in pairs]
    differences = [abs(mine[token] - theirs[token]) for mine, theirs in firsts for token in mine.keys() & theirs.keys()]
    assert max(differences) < COMPILED_TOLERANCE


def test_compiled_replays_equal_compiled_eager_steps(bf16_checkpoint: Path) -> None:
    with both(bf16_checkpoint, layers="layers") as (graphs, eager):
        assert largest_difference(ask_alone(graphs, MIXED), ask_alone(eager, MIXED)) == 0
