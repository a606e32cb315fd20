"""Everything that leaves for clients goes through here, on a thread of its own beside the engine.

Turns tokens into text, finds stop strings, sends responses, and watches for cancelled requests. When it is behind, or
many stream, the tokens of a request that wait become one response; the first and the last go out at once.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from deepstack_serving.engine.answer import Answer
from deepstack_serving.engine.events import Begin, Event, Tokens
from deepstack_serving.engine.sequence import Sequence as Running
from deepstack_serving.errors import CancelledError, DeepstackError, UnavailableError

POLL_INTERVAL_S = 0.02
RESPONSES_PER_S = 1000  # of all streams together: each costs the server as much as many tokens do
_KEPT_TEXTS = 1 << 16  # texts of single tokens, for log-probabilities
ENDED = UnavailableError(
    "this model is shutting down, or it has failed and must be loaded again; the server's log says which"
)


class OutputWorker:
    """`end_early` tells the engine that a request is over for its client: stop string found, or cancelled."""

    def __init__(self, tokenizer: Any, end_early: Callable[[Running], None]) -> None:
        self._tokenizer = tokenizer
        self._end_early = end_early
        self._events: queue.SimpleQueue[Sequence[Event] | None] = queue.SimpleQueue()
        self._in_hand: list[Event] = []
        self._open: dict[Running, Answer] = {}
        self._put_off: dict[Running, Answer] = {}
        self._text_of = lru_cache(_KEPT_TEXTS)(lambda token_id: tokenizer.decode([token_id]))
        self._poll_s = 0.0
        self._is_closed = self.is_dead = False

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
            while not self._is_closed:
                self._take()
                self._handle()
                self._poll()
        finally:
            self.is_dead = True
            self._end_all()

    def _end_all(self) -> None:
        """Fail what is open, in hand, and still in the queue."""
        left = set(self._open) | {event.sequence for event in self._in_hand}
        self._open.clear()
        self._in_hand.clear()
        while not self._events.empty():
            left |= {event.sequence for event in self._events.get() or ()}
        for sequence in left:
            sequence.reply.fail(ENDED)

    def _take(self) -> None:
        """Everything that is in the queue, after waiting for something."""
        try:
            events = self._events.get(timeout=self._patience_s())
            while events is not None:
                self._in_hand += events
                events = self._events.get_nowait()
            self._is_closed = True
        except queue.Empty:
            pass

    def _patience_s(self) -> float | None:
        if not self._open:
            return None
        return min(POLL_INTERVAL_S, len(self._open) / RESPONSES_PER_S) if self._put_off else POLL_INTERVAL_S

    def _handle(self) -> None:
        touched, self._put_off = self._put_off, {}
        for event in self._in_hand:
            if isinstance(event, Tokens):
                if (answer := self._open.get(event.sequence)) is not None:
                    answer.add(event)
                    touched[event.sequence] = answer
            elif isinstance(event, Begin):
                now_s = time.monotonic()
                self._open[event.sequence] = Answer(event.sequence, self._tokenizer, self._text_of, now_s)
            else:
                if (answer := touched.pop(event.sequence, None)) is not None:
                    self._settle(answer)
                self._fail(event.sequence, event.error)
        now_s = time.monotonic()
        until_s = now_s - len(self._open) / RESPONSES_PER_S
        for answer in touched.values():
            if answer.may_wait(until_s):
                self._put_off[answer.sequence] = answer
            else:
                self._settle(answer)
        self._in_hand.clear()

    def _settle(self, answer: Answer) -> None:
        output = answer.settle()
        if output is None:
            return
        is_final = answer.finish_reason is not None
        if is_final:
            del self._open[answer.sequence]
            if answer.ends_early:
                self._end_early(answer.sequence)
        answer.sent_s = time.monotonic()
        answer.sequence.reply.send(output, final=is_final)

    def _poll(self) -> None:
        now_s = time.monotonic()
        if now_s - self._poll_s < POLL_INTERVAL_S / 4:
            return
        self._poll_s = now_s
        due = [answer for answer in self._open.values() if now_s - answer.polled_s >= POLL_INTERVAL_S]
        for answer in due:
            answer.polled_s = now_s
            if answer.sequence.reply.is_cancelled():
                self._end_early(answer.sequence)
                self._fail(answer.sequence, CancelledError("the request was cancelled by its client"))

    def _fail(self, sequence: Running, error: DeepstackError) -> None:
        self._put_off.pop(sequence, None)
        if self._open.pop(sequence, None) is not None:
            sequence.reply.fail(error)
