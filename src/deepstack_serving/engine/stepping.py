"""The engine's steps: what runs next, through the stages, and what became of it. On the engine thread.

A step that fails is tried again for each of its requests alone, one decode step at a time, so that one request's fault
stays its own. With several groups of sequences a step of each runs beside the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from deepstack_serving.engine.burst_calls import RunningBurst
from deepstack_serving.engine.burst_policy import BurstPolicy
from deepstack_serving.engine.connection import Connection
from deepstack_serving.engine.events import Event, Failure, Tokens
from deepstack_serving.engine.inbox import Inbox
from deepstack_serving.engine.outputs import OutputWorker
from deepstack_serving.engine.overlap import OverlappingSteps
from deepstack_serving.engine.pipeline import PackedStep, StagePipeline, StepTokens
from deepstack_serving.engine.progress import record
from deepstack_serving.engine.scheduler import Scheduler, Work
from deepstack_serving.engine.sequence import Sequence as Running
from deepstack_serving.engine.sequence import Status
from deepstack_serving.errors import DeepstackError
from deepstack_serving.settings import Settings
from deepstack_serving.stages.info import StageInfo

POLL_S = 0.001  # how often, beside a step of all stages, tokens and messages are looked for
FEW_EVENTS = 4  # that leave at once: making and sending them takes less than waiting for the next step to be called


@dataclass
class EngineStats:
    """Counts since the start. Written by the engine thread, read by anyone. A burst counts as its decode steps."""

    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0


class Stepping:
    """Steps the scheduler's sequences. Their ends go to the scheduler and the output worker."""

    def __init__(
        self,
        settings: Settings,
        connection: Connection,
        pipeline: StagePipeline,
        scheduler: Scheduler,
        outputs: OutputWorker,
        inbox: Inbox,
        eos_token_ids: Collection[int],
        meanwhile: Callable[[], None],
    ) -> None:
        """`meanwhile` is called again and again beside a step of all stages: requests come in, images get encoded."""
        self.stats = EngineStats()
        self._policy = BurstPolicy(settings.decode_steps_per_call, inbox)
        self._micro_batches, self._connection, self._pipeline = settings.micro_batches, connection, pipeline
        self._scheduler, self._outputs = scheduler, outputs
        self._meanwhile = meanwhile
        self._overlap = OverlappingSteps(pipeline, scheduler, inbox)
        self._eos = frozenset(eos_token_ids)
        self._held: list[Event] = []
        self._groups = 1

    @property
    def is_busy(self) -> bool:
        """Whether a step runs beside the engine."""
        return self._overlap.are_running

    @property
    def is_settling(self) -> bool:
        """Whether no step may begin before those that run beside the engine are over."""
        return self._groups != self._scheduler.groups

    def divide(self) -> None:
        """Divide the sequences into as many groups as the settings say, or as the stages have devices: while there are
        prompts to compute. When all decode, one burst of all is faster than single steps of groups.
        """
        self._groups = self._micro_batches or len({info.device for info in self._stages})
        if self._groups > 1 and self._can_burst() and not self._scheduler.has_prompts:
            self._groups = 1
        if self.is_settling and not self.is_busy:
            self._scheduler.set_groups(self._groups)

    def advance(self) -> None:
        """Run a step, or begin one of every group that can."""
        if self.is_settling:
            return
        if self._scheduler.groups > 1:
            for group in self._scheduler.free_groups():
                self._begin(group)
        elif work := self._scheduler.plan():
            self._step(work, self._steps(work))
        if not self._scheduler.has_work:
            self._hand_out()

    def end(self, group: int) -> None:
        """A step that ran beside the engine is over."""
        ended = self._overlap.end(group)
        if ended is None:
            return
        try:
            result = ended.future.result()
        except DeepstackError as error:
            self._recover(ended.work, error, was_linked=ended.is_linked)
        else:
            self.stats.steps += 1
            self._record(ended.work, result)
            self._hand_out()

    def close(self) -> None:
        """Wait for the steps that run beside the engine."""
        self._hand_out()
        self._overlap.close()
        self._pipeline.close()

    @property
    def _stages(self) -> Sequence[StageInfo]:
        """The language stages."""
        return self._connection.infos[1:]

    def _can_burst(self) -> bool:
        return self._policy.limit(self._stages) > 1 and self._pipeline.bursts().are_possible()

    def _can_link(self, step: PackedStep) -> bool:
        return self._policy.limit(self._stages) > 1 and self._pipeline.can_link(step)

    def _steps(self, work: Sequence[Work]) -> int:
        steps = self._policy.steps(work, self._stages)
        return steps if steps == 1 or self._pipeline.bursts().are_possible() else 1

    def _step(self, work: Sequence[Work], steps: int = 1, *, may_link: bool = True) -> None:
        is_linked = False
        try:
            step = self._pipeline.pack(work, steps)
            is_linked = steps > 1 or (may_link and self._can_link(step))
            if steps > 1:
                self._burst(work, step)
            else:
                result = self._run_linked(work, step) if is_linked else self._run(step)
                self.stats.steps += 1
                self._record(work, result)
        except DeepstackError as error:
            self._recover(work, error, was_linked=is_linked)

    def _run(self, step: PackedStep) -> StepTokens:
        """A single step, stage after stage."""
        self._hand_out()  # only now: the output thread works while the stages do, not while this one packs
        return self._pipeline.run(step)

    @contextmanager
    def _all_called(self, work: Sequence[Work], step: PackedStep) -> Iterator[RunningBurst]:
        """Stands around a step, or a burst, of all stages at once, beside which the engine goes on."""
        burst = self._pipeline.begin(step)
        burst.wait_until_called()
        self._hand_out()
        self._scheduler.depart(0, work)
        try:
            yield burst
        finally:
            burst.is_over()  # else a stage might write to blocks that are given back
            self._scheduler.arrive(0, work)

    def _run_linked(self, work: Sequence[Work], step: PackedStep) -> StepTokens:
        """A single step of all stages at once."""
        with self._all_called(work, step) as burst:
            while not burst.is_over(POLL_S):
                self._meanwhile()
            return self._pipeline.finish(step, burst)

    def _burst(self, work: Sequence[Work], step: PackedStep) -> None:
        """Run several decode steps, and record their tokens as they come; for some, alternatives come at the end."""
        late = {item.sequence for item in work if item.sequence.request.sampling.logprobs}
        over: set[Running] = set()  # of the late ones
        recorded = 0
        with self._all_called(work, step) as burst:
            while not burst.is_over(POLL_S):
                steps = burst.steps
                if steps > recorded:
                    tokens = StepTokens(*burst.tokens(recorded, steps))
                    self._record(work, tokens, late)
                    over |= self._ended(work, tokens) & late
                    self._hand_out()
                    recorded = steps
                self._meanwhile()
                ended = len(over) + sum(item.sequence.status is Status.FINISHED for item in work)
                if self._policy.must_end(self._scheduler, ended, len(work)):
                    burst.end_early()
            result = self._pipeline.finish(step, burst)
            self.stats.steps += result.steps
            self._record(work, result.behind(recorded), late)
            self._record(work, result, {item.sequence for item in work} - late)

    def _ended(self, work: Sequence[Work], tokens: StepTokens) -> set[Running]:
        """Sequences with a token that ends them."""
        return {
            item.sequence
            for item, ids in zip(work, tokens.ids, strict=True)
            if min(ids) < 0 or not (item.sequence.request.sampling.ignore_eos or self._eos.isdisjoint(ids))
        }

    def _begin(self, group: int) -> None:
        self._scheduler.balance(group)
        work = self._scheduler.plan(group)
        if not work:
            return
        try:
            step = self._pipeline.pack(work, group=group)
        except DeepstackError as error:
            self._recover(work, error)
        else:
            self._overlap.begin(group, work, step, is_linked=self._can_link(step))

    def _record(self, work: Sequence[Work], result: StepTokens, without: Collection[Running] = ()) -> None:
        """Take the tokens in, but for those of some sequences."""
        if not result.steps:
            return
        events: list[Event] = []
        row = 0
        for item in work:
            if not item.decodes:
                self.stats.prompt_tokens += item.end - item.start
                if not item.samples:
                    item.sequence.computed = item.end
                    continue
            if item.sequence.status is Status.RUNNING and item.sequence not in without:  # else it ended meanwhile
                events += record(_present(item), result, row, self._eos)
            row += 1
        for event in events:
            if isinstance(event, Tokens):
                self.stats.generated_tokens += len(event.ids)
                if event.finish_reason is None:
                    continue
            self._scheduler.finish(event.sequence)
        self._held += events
        if len(self._held) <= FEW_EVENTS:
            self._hand_out()

    def _hand_out(self) -> None:
        if self._held:
            self._outputs.put(self._held)
            self._held = []

    def _recover(self, work: Sequence[Work], error: DeepstackError, *, was_linked: bool = False) -> None:
        """After a failed step: requests that hold blocks end when a stage lost its pool; else each is tried alone, in
        calls of one stage after the other.
        """
        if not self._connection.still_open():
            for sequence in list(self._scheduler.running):
                self._fail(sequence, error)
            self._overlap.settle()
        elif len(work) == 1 and not was_linked:
            self._fail(work[0].sequence, error)
        else:
            for item in work:
                if item.sequence.status is Status.RUNNING:
                    self._step([_present(item)], may_link=False)

    def _fail(self, sequence: Running, error: DeepstackError) -> None:
        self._scheduler.finish(sequence)
        self._held.append(Failure(sequence, error))
        self._hand_out()


def _present(item: Work) -> Work:
    """The same, of a sequence that may have gone on meanwhile."""
    computed = item.sequence.computed
    return Work(item.sequence, computed, computed + 1, True) if item.decodes else item
