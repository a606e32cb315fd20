"""What goes on beside a step: tokens are handed out, requests come in."""

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
from deepstack_serving.engine.stepping import FEW_EVENTS, Stepping
from deepstack_serving.settings import Settings
from deepstack_serving.stages.info import StageInfo
from tests.support.sequences import sequence

STAGES = tuple(StageInfo(name, "", "FP32", "cuda:0", "") for name in ("language_early", "language_late"))


class Pipeline:
    """Stages that answer every row with token 7, and a burst with one step; calls of all are over after some polls."""

    def __init__(self, log: list[str]) -> None:
        self._log = log
        self.bursts = lambda _group=0: SimpleNamespace(are_possible=lambda: True)
        self.steps = self.polls = 0

    def pack(self, work: Sequence[Work], _steps: int) -> int:
        return len(work)

    def can_link(self, _step: int) -> bool:
        return True

    def begin(self, _step: int) -> Any:
        self._log.append("begin")
        return self

    def wait_until_called(self) -> None:
        self._log.append("called")

    def is_over(self, wait_s: float | None = None) -> bool:
        self.polls -= wait_s is not None
        return wait_s is None or self.polls < 0

    def finish(self, step: int, _burst: object) -> StepTokens:
        return StepTokens([[7]] * step, [[-1.0]] * step)

    def run(self, step: int) -> StepTokens:
        self._log.append("run")
        return self.finish(step, None)


class Made:
    """The engine's steps with so many requests, none of which has an answer yet."""

    def __init__(self, settings: Settings, requests: int) -> None:
        self.log: list[str] = []
        self.in_step: list[bool] = []
        self.pipeline = Pipeline(self.log)
        self.scheduler = Scheduler(BlockAllocator(400, 4), 8, 8, 100)
        connection = SimpleNamespace(infos=(STAGES[0], *STAGES))
        outputs = SimpleNamespace(put=lambda _events: self.log.append("hand out"))
        parts = (connection, self.pipeline, self.scheduler, outputs)
        self.stepping = Stepping(settings, *cast(Any, parts), Inbox(), (), self._meanwhile)
        for _ in range(requests):
            self.scheduler.add(sequence(5, 40))
        self.scheduler.admit()

    def _meanwhile(self) -> None:
        self.in_step.append(self.scheduler.running[0].is_in_step)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (Settings(Path()), ["begin", "called", "begin", "called", "hand out"]),
        (Settings(Path(), decode_steps_per_call=1), ["run", "hand out", "run"]),
    ],
)
def test_many_tokens_leave_when_the_next_step_is_under_way(settings: Settings, expected: list[str]) -> None:
    made = Made(settings, FEW_EVENTS + 1)
    made.stepping.advance()
    assert "hand out" not in made.log
    made.stepping.advance()
    assert made.log[: len(expected)] == expected


def test_few_tokens_leave_at_once() -> None:
    made = Made(Settings(Path()), FEW_EVENTS)
    made.stepping.advance()
    assert made.log == ["begin", "called", "hand out"]


@pytest.mark.parametrize("decodes", [False, True])
def test_requests_come_in_beside_a_step(decodes: bool) -> None:
    made = Made(Settings(Path()), 1)
    if decodes:
        made.stepping.advance()
    made.pipeline.polls = 3
    made.stepping.advance()
    assert made.in_step == [True] * 3
    assert not made.scheduler.running[0].is_in_step
