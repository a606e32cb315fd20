"""When tokens are handed out: sending them must not hold up the calls of the next step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from deepstack_serving.engine.block_allocator import BlockAllocator
from deepstack_serving.engine.inbox import Inbox
from deepstack_serving.engine.pipeline import StepTokens
from deepstack_serving.engine.scheduler import Scheduler, Work
from deepstack_serving.engine.stepping import Stepping
from deepstack_serving.settings import Settings
from deepstack_serving.stages.info import StageInfo
from tests.support.sequences import sequence

STAGES = tuple(StageInfo(name, "", "FP32", "cuda:0", "") for name in ("language_early", "language_late"))


class Pipeline:
    """Stages that answer every row with token 7, and a burst with one step."""

    def __init__(self, log: list[str]) -> None:
        self._log = log
        self.bursts = SimpleNamespace(are_possible=lambda: True, ended=lambda _error: None)
        self.steps = 1

    def pack(self, work: Sequence[Work], _steps: int) -> int:
        return len(work)

    def can_link(self, _step: int) -> bool:
        return True

    def begin(self, _step: int) -> Any:
        self._log.append("begin")
        return self

    def wait_until_called(self) -> None:
        self._log.append("called")

    def is_over(self, _wait_s: float | None = None) -> bool:
        return True

    def finish(self, step: int, _burst: object) -> StepTokens:
        return StepTokens([[7]] * step, [[-1.0]] * step)

    def run(self, step: int) -> StepTokens:
        self._log.append("run")
        return self.finish(step, None)


def made(settings: Settings, log: list[str]) -> tuple[Stepping, Scheduler]:
    scheduler = Scheduler(BlockAllocator(400, 4), 8, 8, 100)
    connection = SimpleNamespace(infos=(STAGES[0], *STAGES))
    outputs = SimpleNamespace(put=lambda _events: log.append("hand out"))
    parts = (connection, Pipeline(log), scheduler, outputs)
    return Stepping(settings, *cast(Any, parts), Inbox(), ()), scheduler


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (Settings(Path()), ["begin", "called", "begin", "called", "hand out"]),
        (Settings(Path(), decode_steps_per_call=1), ["run", "hand out", "run"]),
    ],
)
def test_tokens_leave_when_the_next_step_is_under_way(settings: Settings, expected: list[str]) -> None:
    log: list[str] = []
    stepping, scheduler = made(settings, log)
    scheduler.add(sequence(5, 40))
    scheduler.admit()
    stepping.advance()
    assert "hand out" not in log
    stepping.advance()
    assert log == expected
