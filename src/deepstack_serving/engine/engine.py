"""The engine thread: takes requests in, steps all running ones together, hands tokens out.

Only this thread touches sequences, the scheduler and the block numbers; others reach it through its inbox.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable

from deepstack_serving.engine.connection import Connection
from deepstack_serving.engine.encode_queue import EncodeQueue
from deepstack_serving.engine.encoder import Encoder
from deepstack_serving.engine.events import Begin, Failure
from deepstack_serving.engine.inbox import Encoded, EndedEarly, Inbox, Message, Submitted
from deepstack_serving.engine.outputs import ENDED, OutputWorker
from deepstack_serving.engine.pipeline import StagePipeline
from deepstack_serving.engine.scheduler import Scheduler
from deepstack_serving.engine.sequence import Sequence as Running
from deepstack_serving.engine.sequence import Status
from deepstack_serving.engine.stepping import EngineStats, Stepping
from deepstack_serving.errors import DeepstackError, InvalidRequestError, UnavailableError
from deepstack_serving.families.base import Positions
from deepstack_serving.prompt.placeholders import text_positions
from deepstack_serving.settings import Settings

IDLE_WAIT_S = 0.2
HEARTBEAT_LIMIT_S = 30.0
EXPIRY_INTERVAL_S = 0.05


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
        self.outputs = outputs
        self.scheduler: Scheduler = connection.make_scheduler(settings)
        self._settings, self._connection, self._pipeline, self._encoder = settings, connection, pipeline, encoder
        # Of the prompts that a step computes beside a token of each request that decodes.
        self._prompt_tokens = max(1, settings.prefill_token_budget - settings.max_running_requests)
        self._encodings = EncodeQueue(encoder, self._prompt_tokens)
        self.inbox = inbox
        parts = (connection, pipeline, self.scheduler, outputs, inbox)
        self._stepping = Stepping(settings, *parts, eos_token_ids, self._take_in)
        self._backlog: list[Running] = []
        self._heartbeat_s = time.monotonic()
        self._expired_s = 0.0

    @property
    def stats(self) -> EngineStats:
        return self._stepping.stats

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
                if self._is_idle and not self._backlog:
                    self._connection.refresh()
                if self._connect():
                    self._admit()
                    self._stepping.advance()
                    self._encode()  # for the next one, where a prompt that was computed was the answer's end, too
                    if self._is_idle:
                        self.scheduler.allocator.check(idle=True)
        finally:
            self.inbox.close()
            self._encoder.close()
            self._stepping.close()
            self._receive()
            self._end_all(ENDED)
            self.outputs.close()

    @property
    def _is_idle(self) -> bool:
        return self.scheduler.is_idle and not self._stepping.is_busy

    def _receive(self) -> bool:
        """Handle all messages, waiting for one when there is nothing to step. False after `close`."""
        can_step = self._connection.is_open and self.scheduler.has_work and not self._stepping.is_settling
        self._handle(self.inbox.take(0.0 if can_step else IDLE_WAIT_S))
        return not self.inbox.is_closed

    def _take_in(self) -> None:
        """What came meanwhile, while a step runs."""
        self._handle(self.inbox.take(0.0))
        self._expire()
        self._admit(patient=True)

    def _handle(self, messages: Iterable[Message]) -> None:
        for message in messages:
            if isinstance(message, Submitted):
                if message.sequence.status is Status.WAITING:  # else its client left before it came in
                    self._backlog.append(message.sequence)
            elif isinstance(message, EndedEarly):
                self._finish(message.sequence)
            elif isinstance(message, Encoded):
                self._encoded(message)
            else:
                self._stepping.end(message.group)

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
            self._stepping.divide()
            return True
        if self._connection.closed_for_s > self._settings.startup_timeout_s:
            self._end_all(UnavailableError(f"the stages are not ready: {self._connection.reason}"))
        return False

    def _admit(self, *, patient: bool = False) -> None:
        """Requests that came and those that wait; `patient`: images that came may wait for others, see EncodeQueue."""
        self._connection.size(self.scheduler.allocator)
        encodes_on_gpu = self._connection.infos[0].device.startswith("cuda")
        self._encoder.batch_tokens = self._prompt_tokens if encodes_on_gpu else 0
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
                self._encodings.add(sequence)
            else:
                sequence.positions = Positions(text_positions(sequence.prompt, self._pipeline.position_axes), 0)
        self._encode(patient=patient)

    def _encode(self, *, patient: bool = False) -> None:
        running, groups = self.scheduler.running, self.scheduler.groups
        self._encodings.begin(running, self.inbox.put_encoded, groups, patient=patient)

    def _expire(self) -> None:
        now_s = time.monotonic()
        if now_s - self._expired_s < EXPIRY_INTERVAL_S:
            return
        self._expired_s = now_s
        for sequence in [item for item in self._all() if item.deadline_s <= now_s]:
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
