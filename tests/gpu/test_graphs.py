"""Graphs of real captures against eager steps on the GPU: the same ids, and log-probabilities without any difference.

Compiled layers: test_compiled_graphs.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.asking import MIXED, ONE_IMAGE, TEXT, Ask, ask_alone, ask_together, picture
from tests.support.gpu_servers import both, largest_difference, served
from tests.support.local import LocalServer, keep, local_settings, zero_deepstack

LONG = Ask("describe the image", (picture(190, 190, 5),))
SHORT = Ask("describe the image", (picture(64, 64, 6),))
EDGES = tuple(Ask("a" * count) for count in (1, 2, 3, *range(8, 128, 5)))
CROWD = tuple(Ask("a" * (3 + count), (picture(64 + 3 * count, 70, count),) if count % 3 else ()) for count in range(9))


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_replays_equal_eager_steps(bf16_checkpoint: Path, stages: int) -> None:
    with both(bf16_checkpoint, stages) as (graphs, eager):
        assert largest_difference(ask_alone(graphs, MIXED), ask_alone(eager, MIXED)) == 0


def test_replays_equal_eager_steps_in_full_precision(checkpoint: Path) -> None:
    with both(checkpoint) as (graphs, eager):
        assert largest_difference(ask_alone(graphs, MIXED), ask_alone(eager, MIXED)) == 0


def test_the_gpu_agrees_with_the_cpu(checkpoint: Path) -> None:
    with served(checkpoint, "graph") as graphs, LocalServer(local_settings(checkpoint), held=True) as cpu:
        assert largest_difference(ask_alone(graphs, MIXED), ask_alone(cpu, MIXED)) < 5e-3


def test_zeroed_deepstack_differs(bf16_checkpoint: Path) -> None:
    answers = []
    for execution in ("graph", "eager"):
        for change in (keep, zero_deepstack):
            with served(bf16_checkpoint, execution, change=change) as server:
                answers += ask_alone(server, [ONE_IMAGE])
    normal, zeroed, eager_normal, eager_zeroed = answers
    assert normal.top_distance(zeroed) > 0.1
    assert largest_difference([normal, zeroed], [eager_normal, eager_zeroed]) == 0


@pytest.mark.parametrize("order", [(LONG, SHORT, TEXT), (TEXT, ONE_IMAGE), (SHORT, LONG, SHORT)])
def test_what_ran_before_leaves_nothing_behind(bf16_checkpoint: Path, order: tuple[Ask, ...]) -> None:
    with both(bf16_checkpoint) as (graphs, eager):
        assert largest_difference(ask_alone(graphs, order), ask_alone(eager, order)) == 0


def test_every_edge_of_a_size(bf16_checkpoint: Path) -> None:
    with both(bf16_checkpoint) as (graphs, eager):
        assert largest_difference(ask_alone(graphs, EDGES), ask_alone(eager, EDGES)) == 0


def test_mixed_requests_together(bf16_checkpoint: Path) -> None:
    with both(bf16_checkpoint) as (graphs, eager):
        assert largest_difference(ask_together(graphs, CROWD), ask_together(eager, CROWD)) == 0


def test_seeded_sampling_is_the_same(bf16_checkpoint: Path) -> None:
    sampled = {"temperature": 1.2, "top_k": 100, "top_p": 0.95, "seed": 11}
    with both(bf16_checkpoint) as (graphs, eager):
        assert largest_difference(ask_alone(graphs, MIXED, **sampled), ask_alone(eager, MIXED, **sampled)) == 0
