"""The engine thread: takes requests in, steps all running ones together, hands tokens out.

Only this thread touches sequences, the scheduler and the block numbers; others reach it through its inbox. A step that
fails is tried again for each of its requests alone, so that one request's fault stays its own.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from deepstack_serving.engine.connection import Connection
from deepstack_serving.engine.encoder import Encoder
from deepstack_serving.engine.inbox import Encoded, EndedEarly, Inbox, Submitted
from deepstack_serving.engine.outputs import ENDED, Begin, Event, Failure, OutputWorker, Token
from deepstack_serving.engine.pipeline import SampledToken, StagePipeline
from deepstack_serving.engine.scheduler import Scheduler, Work
from deepstack_serving.engine.sequence import Sequence as Running
from deepstack_serving.engine.sequence import Status
from deepstack_serving.errors import DeepstackError, InvalidRequestError, StageError, UnavailableError
from deepstack_serving.families.base import Positions
from deepstack_serving.prompt.placeholders import text_positions
from deepstack_serving.settings import Settings

IDLE_WAIT_S = 0.2
HEARTBEAT_LIMIT_S = 30.0


@dataclass
class EngineStats:
    """Counts since the start. Written by the engine thread, read by anyone."""

    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0


class Engine:
    """One per orchestrator. `run` is the body of its thread, `outputs.run` that of the thread beside it."""

    def __init__(
        self,
        settings: Settings,
        connection: Connection,
        pipeline: StagePipeline,
        encoder: Encoder,
        outputs: OutputWorker,
        inbox: Inbox,
        eos_token_ids: Collection[int],
    ) -> None:
        self.stats = EngineStats()
        self.outputs = outputs
        self.scheduler: Scheduler = connection.make_scheduler(settings)
        self._settings, self._connection, self._pipeline, self._encoder = settings, connection, pipeline, encoder
        self.inbox = inbox
        self._eos = frozenset(eos_token_ids)
        self._backlog: list[Running] = []
        self._heartbeat_s = time.monotonic()

    def submit(self, sequence: Running) -> None:
        """Accept a request, from any thread. Its reply ends exactly once from here on, whatever happens."""
        self.outputs.put([Begin(sequence)])
        if not self.inbox.put(Submitted(sequence)):
            self.outputs.put([Failure(sequence, ENDED)])

    def close(self) -> None:
        """End `run`; requests that are still open fail."""
        self.inbox.close()

    @property
    def is_healthy(self) -> bool:
        """Stages agree with each other and the engine thread goes round."""
        return self._connection.is_open and time.monotonic() - self._heartbeat_s < HEARTBEAT_LIMIT_S

    def run(self) -> None:
        """The thread's body; ends after `close`."""
        try:
            while self._receive() and not self.outputs.is_dead:
                self._heartbeat_s = time.monotonic()
                self._expire()
                if self.scheduler.is_idle and not self._backlog:
                    self._connection.refresh()
                if self._connect():
                    self._advance()
        finally:
            self.inbox.close()
            self._encoder.close()
            self._receive()
            self._end_all(ENDED)
            self.outputs.close()

    def _receive(self) -> bool:
        """Handle all messages, waiting for one when there is nothing to step. False after `close`."""
        can_step = self._connection.is_open and self.scheduler.has_work
        for message in self.inbox.take(0.0 if can_step else IDLE_WAIT_S):
            if isinstance(message, Submitted):
                if message.sequence.status is Status.WAITING:  # else its client left before it came in
                    self._backlog.append(message.sequence)
            elif isinstance(message, EndedEarly):
                self._finish(message.sequence)
            else:
                self._encoded(message)
        return not self.inbox.is_closed

    def _encoded(self, message: Encoded) -> None:
        sequence, result = message.sequence, message.result
        if sequence.status is not Status.ENCODING:
            return
        if isinstance(result, DeepstackError):
            self._fail(sequence, result)
            return
        sequence.features, sequence.positions, sequence.status = result, result.positions, Status.RUNNING

    def _connect(self) -> bool:
        """True when the stages are known to be there. Until then requests wait, for `startup_timeout_s` at most."""
        if self._connection.is_open or self._connection.try_open():
            return True
        if self._connection.closed_for_s > self._settings.startup_timeout_s:
            self._end_all(UnavailableError(f"the stages are not ready: {self._connection.reason}"))
        return False

    def _advance(self) -> None:
        self._admit()
        work = self.scheduler.plan()
        if work:
            self._step(work)
        elif self.scheduler.is_idle:
            self.scheduler.allocator.check(idle=True)

    def _admit(self) -> None:
        self._connection.size(self.scheduler.allocator)
        admitted = self.scheduler.admit()
        for sequence in self._backlog:
            try:
                self.scheduler.add(sequence)
            except (InvalidRequestError, UnavailableError) as error:
                self._report(sequence, error)
            admitted += self.scheduler.admit()  # at once: one that can run does not count as waiting
        self._backlog.clear()
        for sequence in admitted:
            if sequence.files:
                self._encoder.submit(sequence, self.inbox.put_encoded)
            else:
                sequence.positions = Positions(text_positions(sequence.prompt, self._pipeline.position_axes), 0)

    def _step(self, work: Sequence[Work]) -> None:
        try:
            tokens = self._pipeline.run(work)
        except DeepstackError as error:
            self._recover(work, error)
            return
        self.stats.steps += 1
        events: list[Event] = []
        for item, token in zip(work, tokens, strict=True):
            events += self._apply(item, token)
        self.outputs.put(events)

    def _apply(self, item: Work, token: SampledToken | None) -> list[Event]:
        """Record what a step computed for one sequence."""
        sequence = item.sequence
        if sequence.in_prefill:
            self.stats.prompt_tokens += item.end - item.start
        sequence.computed = item.end
        if token is None:
            return []
        sequence.features = None
        token_id, logprobs = token
        if token_id < 0:
            self._finish(sequence)
            return [Failure(sequence, StageError("the model's logits are not finite; this request cannot be answered"))]
        self.stats.generated_tokens += 1
        sequence.output_ids.append(token_id)
        is_end = token_id in self._eos and not sequence.request.sampling.ignore_eos
        reason = "stop" if is_end else "length" if len(sequence.output_ids) >= sequence.max_tokens else None
        if reason is not None:
            self._finish(sequence)
        return [Token(sequence, token_id, logprobs, reason, is_end)]

    def _recover(self, work: Sequence[Work], error: DeepstackError) -> None:
        """After a failed step: requests that hold blocks end when a stage lost its pool; else each is tried alone."""
        if not self._connection.still_open():
            for sequence in list(self.scheduler.running):
                self._fail(sequence, error)
        elif len(work) == 1:
            self._fail(work[0].sequence, error)
        else:
            for item in work:
                if item.sequence.status is Status.RUNNING:
                    self._step([item])

    def _expire(self) -> None:
        now = time.monotonic()
        for sequence in [item for item in self._all() if item.deadline_s <= now]:
            limit = self._settings.request_timeout_s
            self._fail(sequence, UnavailableError(f"the request took longer than {limit:g} s ('request_timeout_s')"))

    def _all(self) -> list[Running]:
        return [*self._backlog, *self.scheduler.waiting, *self.scheduler.running]

    def _end_all(self, error: DeepstackError) -> None:
        for sequence in self._all():
            self._fail(sequence, error)

    def _fail(self, sequence: Running, error: DeepstackError) -> None:
        self._finish(sequence)
        self._report(sequence, error)

    def _report(self, sequence: Running, error: DeepstackError) -> None:
        self.outputs.put([Failure(sequence, error)])

    def _finish(self, sequence: Running) -> None:
        if sequence in self._backlog:
            self._backlog.remove(sequence)
        self.scheduler.finish(sequence)
