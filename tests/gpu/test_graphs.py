"""Graphs of real captures against eager steps on the GPU: the same ids, and log-probabilities without any difference.

Compiled layers run the same code in both; how much compilation itself may change is bounded against plain layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.support.asking import MIXED, ONE_IMAGE, TEXT, Answer, Ask, ask_alone, ask_together, picture
from tests.support.graphs import SIZES
from tests.support.local import Change, LocalServer, keep, local_settings, zero_deepstack

LONG = Ask("describe the image", (picture(190, 190, 5),))
SHORT = Ask("describe the image", (picture(64, 64, 6),))
EDGES = tuple(Ask("a" * count) for count in (1, 2, 3, *range(8, 128, 5)))
CROWD = tuple(Ask("a" * (3 + count), (picture(64 + 3 * count, 70, count),) if count % 3 else ()) for count in range(9))
COMPILED_TOLERANCE = 0.15  # in log-probability, of bfloat16


def served(
    checkpoint: Path, execution: str, stages: int = 2, change: Change = keep, layers: str = "off"
) -> LocalServer:
    settings = local_settings(checkpoint, device="cuda:0", execution=execution, compile=layers, **SIZES)
    return LocalServer(settings, stages, change, held=True)


@contextmanager
def both(checkpoint: Path, stages: int = 2, layers: str = "off") -> Iterator[tuple[LocalServer, LocalServer]]:
    """A server that replays graphs, and one that does not."""
    with ExitStack() as stack:
        graphs, eager = (
            stack.enter_context(served(checkpoint, execution, stages, layers=layers))
            for execution in ("graph", "eager")
        )
        assert all(stage.runner.captured == 8 for stage in graphs.port.language.values())
        assert not any(stage.runner.captured for stage in eager.port.language.values())
        yield graphs, eager


def largest_difference(mine: list[Answer], theirs: list[Answer]) -> float:
    assert [item.ids for item in mine] == [item.ids for item in theirs]
    return max(one.distance(other) for one, other in zip(mine, theirs, strict=True))


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
