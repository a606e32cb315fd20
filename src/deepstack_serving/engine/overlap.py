"""Steps of several groups at once: while one group's rows are in a later stage, another's are in an earlier one."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from deepstack_serving.engine.inbox import Inbox, StepDone
from deepstack_serving.engine.pipeline import PackedStep, StagePipeline, StepTokens
from deepstack_serving.engine.scheduler import Scheduler, Work

_MOST_GROUPS = 16  # that settings allow; threads come as they are needed


@dataclass(frozen=True)
class RunningStep:
    """A step of a group that runs beside the engine; `is_linked`: all stages were called at once."""

    work: Sequence[Work]
    future: Future[StepTokens]
    is_linked: bool


class OverlappingSteps:
    """Runs packed steps on threads of their own. Each ends as a message in the engine's inbox."""

    def __init__(self, pipeline: StagePipeline, scheduler: Scheduler, inbox: Inbox) -> None:
        self._pipeline, self._scheduler, self._inbox = pipeline, scheduler, inbox
        self._pool = ThreadPoolExecutor(_MOST_GROUPS, thread_name_prefix="step")
        self._running: dict[int, RunningStep] = {}

    @property
    def are_running(self) -> bool:
        return bool(self._running)

    def begin(self, group: int, work: Sequence[Work], step: PackedStep, *, is_linked: bool) -> None:
        """Start the step of a group that has none running."""
        self._scheduler.depart(group, work)
        future = self._pool.submit(self._pipeline.run_linked if is_linked else self._pipeline.run, step)
        self._running[group] = RunningStep(work, future, is_linked)
        future.add_done_callback(lambda _: self._inbox.put(StepDone(group)))

    def end(self, group: int) -> RunningStep | None:
        """A group's step that is done; its sequences are the engine's again. None when `settle` has ended it."""
        if group not in self._running or not self._running[group].future.done():
            return None
        ended = self._running.pop(group)
        self._scheduler.arrive(group, ended.work)
        return ended

    def settle(self) -> None:
        """Wait for what runs, so that no stage writes into blocks that are given back. Its tokens are lost."""
        wait([step.future for step in self._running.values()])
        for group in list(self._running):
            self.end(group)

    def close(self) -> None:
        """Wait for what runs."""
        self.settle()
        self._pool.shutdown(wait=False)
