"""Everything that leaves for clients goes through here, on a thread of its own beside the engine.

Turns tokens into text, finds stop strings, sends responses, and watches for cancelled requests.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepstack_serving.engine.ports import Output, TokenLogprobs
from deepstack_serving.engine.sequence import Sequence as Running
from deepstack_serving.engine.text_stream import TextStream
from deepstack_serving.errors import CancelledError, DeepstackError, UnavailableError

POLL_INTERVAL_S = 0.02
ENDED = UnavailableError(
    "this model is shutting down, or it has failed and must be loaded again; the server's log says which"
)


@dataclass(frozen=True)
class Begin:
    """A request was accepted: watch it from now on."""

    sequence: Running


@dataclass(frozen=True)
class Token:
    """A new token of a request; `finish_reason` is set on the last."""

    sequence: Running
    token_id: int
    logprobs: TokenLogprobs
    finish_reason: str | None
    is_end: bool = False  # an end-of-sequence token: counted, but not text


@dataclass(frozen=True)
class Failure:
    """A request ends with an error."""

    sequence: Running
    error: DeepstackError


Event = Begin | Token | Failure


@dataclass
class _Open:
    """What a request's client has not been told yet."""

    sequence: Running
    text: TextStream
    polled_s: float
    pending: str = ""
    tokens: int = 0
    cumulative_logprob: float = 0.0
    logprobs: list[dict[str, Any]] = field(default_factory=list)


class OutputWorker:
    """`end_early` tells the engine that a request is over for its client: stop string found, or cancelled."""

    def __init__(self, tokenizer: Any, end_early: Callable[[Running], None]) -> None:
        self._tokenizer = tokenizer
        self._end_early = end_early
        self._events: queue.SimpleQueue[Sequence[Event] | None] = queue.SimpleQueue()
        self._open: dict[Running, _Open] = {}
        self.is_dead = False

    @property
    def active(self) -> int:
        """Requests whose client still waits."""
        return len(self._open)

    def put(self, events: Sequence[Event]) -> None:
        """Hand over events, in order. When the thread is gone, the requests' replies end here."""
        self._events.put(events)
        if self.is_dead:
            self._end_all()

    def close(self) -> None:
        """End `run` after what was put before."""
        self._events.put(None)

    def run(self) -> None:
        """The thread's body; ends after `close`."""
        try:
            while (events := self._next()) is not None:
                for event in events:
                    self._handle(event)
                self._poll()
        finally:
            self.is_dead = True
            self._end_all()

    def _end_all(self) -> None:
        """Fail what is open, and what is still in the queue."""
        left = set(self._open)
        self._open.clear()
        while not self._events.empty():
            left |= {event.sequence for event in self._events.get() or ()}
        for sequence in left:
            sequence.reply.fail(ENDED)

    def _next(self) -> Sequence[Event] | None:
        try:
            return self._events.get(timeout=POLL_INTERVAL_S if self._open else None)
        except queue.Empty:
            return ()

    def _handle(self, event: Event) -> None:
        if isinstance(event, Begin):
            stream = TextStream(self._tokenizer, event.sequence.request.sampling.stop)
            self._open[event.sequence] = _Open(event.sequence, stream, time.monotonic())
        elif isinstance(event, Failure):
            self._fail(event.sequence, event.error)
        elif event.sequence in self._open:
            self._token(self._open[event.sequence], event)

    def _token(self, item: _Open, event: Token) -> None:
        item.tokens += 1
        item.cumulative_logprob += event.logprobs.logprob
        if item.sequence.request.output.logprobs:
            item.logprobs.append(self._describe(event))
        item.pending += "" if event.is_end else item.text.push(event.token_id)
        reason = "stop" if item.text.stopped else event.finish_reason
        if reason is not None and not item.text.stopped:
            item.pending += item.text.flush()
            reason = "stop" if item.text.stopped else reason
        if reason is not None:
            del self._open[item.sequence]
            if event.finish_reason is None:
                self._end_early(item.sequence)
        if reason is not None or (item.sequence.request.output.stream and item.pending):
            self._send(item, reason)

    def _send(self, item: _Open, reason: str | None) -> None:
        request = item.sequence.request
        prefix = request.text or "" if request.output.echo_input else ""
        output = Output(
            text=prefix + item.pending,
            finish_reason=reason,
            input_tokens=item.sequence.prompt.length,
            output_tokens=item.tokens,
            cumulative_logprob=item.cumulative_logprob,
            logprobs=tuple(item.logprobs),
            options=request.output,
        )
        item.pending, item.tokens, item.logprobs = "", 0, []
        item.sequence.reply.send(output, final=reason is not None)

    def _poll(self) -> None:
        now = time.monotonic()
        due = [item for item in self._open.values() if now - item.polled_s >= POLL_INTERVAL_S]
        for item in due:
            item.polled_s = now
            if item.sequence.reply.is_cancelled():
                self._end_early(item.sequence)
                self._fail(item.sequence, CancelledError("the request was cancelled by its client"))

    def _fail(self, sequence: Running, error: DeepstackError) -> None:
        if self._open.pop(sequence, None) is not None:
            sequence.reply.fail(error)

    def _describe(self, event: Token) -> dict[str, Any]:
        values = event.logprobs
        return {
            "token_id": event.token_id,
            "token": self._tokenizer.decode([event.token_id]),
            "logprob": values.logprob,
            "top_logprobs": [
                {"token_id": token_id, "token": self._tokenizer.decode([token_id]), "logprob": logprob}
                for token_id, logprob in zip(values.top_ids, values.top_logprobs, strict=True)
            ],
        }
