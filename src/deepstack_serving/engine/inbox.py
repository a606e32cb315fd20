"""Messages to the engine thread, the only way to it."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass

from deepstack_serving.engine.sequence import Features, Sequence
from deepstack_serving.errors import DeepstackError


@dataclass(frozen=True)
class Submitted:
    """A new request."""

    sequence: Sequence


@dataclass(frozen=True)
class Encoded:
    """A request's images are encoded, or could not be."""

    sequence: Sequence
    result: Features | DeepstackError


@dataclass(frozen=True)
class EndedEarly:
    """A request is over for its client: cancelled, or at a stop string."""

    sequence: Sequence


@dataclass(frozen=True)
class StepDone:
    """The step of a group of sequences, which ran beside the engine, is over."""

    group: int


Message = Submitted | Encoded | EndedEarly | StepDone


class Inbox:
    """Many senders, one receiver. After `close` nothing is taken in any more; what was, can still be taken out."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self.is_closed = False

    def put(self, message: Message) -> bool:
        """Whether the message was taken in."""
        with self._lock:
            if not self.is_closed:
                self._queue.put(message)
            return not self.is_closed

    def put_encoded(self, sequence: Sequence, result: Features | DeepstackError) -> None:
        """The encoder's `done`. After `close` the result is dropped: the engine ends the request itself."""
        self.put(Encoded(sequence, result))

    def put_ended(self, sequence: Sequence) -> None:
        """The output worker's `end_early`."""
        self.put(EndedEarly(sequence))

    def close(self) -> None:
        """Take nothing in from now on, and wake the receiver."""
        with self._lock:
            self.is_closed = True
            self._queue.put(None)

    def take(self, timeout_s: float) -> list[Message]:
        """All messages that are there; waits for a first one, `timeout_s` at most."""
        messages: list[Message] = []
        try:
            item = self._queue.get(timeout=timeout_s) if timeout_s else self._queue.get_nowait()
            while True:
                if item is not None:
                    messages.append(item)
                item = self._queue.get_nowait()
        except queue.Empty:
            return messages
