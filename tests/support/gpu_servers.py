"""Servers on a GPU, in this process, with graphs or without."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.support.asking import Answer
from tests.support.graphs import SIZES
from tests.support.local import Change, LocalServer, keep, local_settings


def served(
    checkpoint: Path, execution: str, stages: int = 2, change: Change = keep, layers: str = "off", dtype: str = "auto"
) -> LocalServer:
    chosen = {"execution": execution, "compile": layers, "dtype": dtype}
    settings = local_settings(checkpoint, device="cuda:0", **chosen, **SIZES)
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
