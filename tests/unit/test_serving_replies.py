"""What must hold on the way out whatever fails there: a final response for every request, and a true count of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from deepstack_serving.engine.events import Begin, Event, Failure
from deepstack_serving.engine.outputs import OutputWorker
from deepstack_serving.engine.ports import Output
from deepstack_serving.errors import StageError
from tests.support.bridge import import_bridge


class Sender:
    """Triton's response sender; the first `broken` responses cannot be sent."""

    def __init__(self, broken: int) -> None:
        self.broken, self.sent = broken, list[tuple[Any, int]]()

    def send(self, response: Any, flags: int) -> None:
        if self.broken:
            self.broken -= 1
            raise MemoryError("no shared memory")
        self.sent.append((response, flags))


def plain(**values: Any) -> SimpleNamespace:
    return SimpleNamespace(**values)


@pytest.fixture
def reply_to(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sender], Any]:
    """The bridge's reply to a request, over a stand-in for Triton's module."""
    bridge = import_bridge(monkeypatch)
    return lambda sender: bridge.TritonReply(plain(get_response_sender=lambda: sender))


OUTPUT = Output("hello", None, 1, 1, 0.0)


@pytest.mark.parametrize("final", [False, True])
def test_response_that_cannot_be_sent_becomes_a_final_error(reply_to: Callable[[Sender], Any], final: bool) -> None:
    sender = Sender(broken=1)
    reply = reply_to(sender)
    reply.send(OUTPUT, final=final)
    reply.send(OUTPUT, final=True)
    assert [(response.error is not None, flags) for response, flags in sender.sent] == [(True, 1)]


def test_sender_that_stays_broken_is_left_alone(reply_to: Callable[[Sender], Any]) -> None:
    reply = reply_to(Sender(broken=2))
    reply.send(OUTPUT, final=False)
    reply.send(OUTPUT, final=True)
    assert not reply.is_cancelled()


class Interrupted(list[Event]):
    """Events whose reading is interrupted by another thread's `put`, as any reading may be."""

    def __init__(self, interrupt: Callable[[], None]) -> None:
        super().__init__()
        self._interrupt = interrupt

    def __iter__(self) -> Iterator[Event]:
        self._interrupt()
        return super().__iter__()


def test_requests_are_counted_whatever_threads_do_between() -> None:
    worker = OutputWorker(None, lambda sequence: None)
    sequence: Any = SequenceStub()
    worker.put(Interrupted(lambda: worker.put([Begin(sequence)])))
    worker.put([Failure(sequence, StageError("over"))])
    worker.put([])
    worker.close()
    worker.run()
    assert worker.active == 0


class SequenceStub:
    """As much of a running request as its failure needs."""

    def __init__(self) -> None:
        self.request = plain(sampling=plain(stop=()))
        self.reply = plain(fail=lambda error: None, is_cancelled=lambda: False)
