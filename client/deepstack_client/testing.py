"""A transport without a server, for tests of this package and of programs that use it.

    fake = FakeTransport(answer("4", "2"), [ServerUnavailableError("busy")])
    with Client(transport=fake) as client:
        assert client.generate("What number?").text == "42"
    assert fake.calls[0].request.inputs["text_input"] == "What number?"

Each request takes the next script. A script is a list of steps: a WireResponse is delivered, an exception is raised, a
Gate holds the request until the test opens it, and the end of the list is the end of the stream.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from deepstack_client.errors import ClientError, RequestCancelledError, RequestTimeoutError
from deepstack_client.request import WireRequest
from deepstack_client.response import OutputValue, WireResponse
from deepstack_client.transports.threaded import ThreadedTransport


class Gate:
    """A point in a script where the request waits, so that a test can act in between without sleeping."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._reached = False
        self._opened = False

    def open(self) -> None:
        with self._changed:
            self._opened = True
            self._changed.notify_all()

    def wait_until_reached(self, timeout_s: float = 10.0) -> bool:
        """Waits until a request stands here; False when none came in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._reached, timeout_s)

    def pass_through(self, call: FakeCall) -> None:
        with self._changed:
            self._reached = True
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._opened or call.cancelled, call.timeout_s):
                raise RequestTimeoutError("the time limit of the request passed")

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()


Step = WireResponse | BaseException | Gate


@dataclass
class FakeCall:
    """One recorded request, and the exchange that plays its script."""

    request: WireRequest
    timeout_s: float | None
    script: Sequence[Step]
    cancelled: bool = False
    _position: int = field(default=0, repr=False)
    _failed: bool = field(default=False, repr=False)

    def receive(self) -> WireResponse | None:
        while not self.cancelled and self._position < len(self.script):
            step = self.script[self._position]
            self._position += 1
            if isinstance(step, WireResponse):
                return step
            if isinstance(step, BaseException):
                self._failed = isinstance(step, ClientError)
                raise step
            step.pass_through(self)
        if self.cancelled:
            raise RequestCancelledError("the request was cancelled")
        return None

    def cancel(self) -> None:
        self.cancelled = not self._failed  # what failed by itself has nothing left to cancel
        for step in self.script:
            if isinstance(step, Gate):
                step.wake()


class FakeTransport:
    """Plays one script per request and records every call. `as_async()` is the same fake for an AsyncClient."""

    def __init__(self, *scripts: Iterable[Step], readiness: Iterable[bool | BaseException] = (True,)) -> None:
        self.calls: list[FakeCall] = []
        self.closed = False
        self._scripts = [list(script) for script in scripts]
        self._readiness = list(readiness)

    def as_async(self) -> ThreadedTransport:
        return ThreadedTransport(self)

    def start(self, request: WireRequest, timeout_s: float | None) -> FakeCall:
        if len(self.calls) == len(self._scripts):
            raise LookupError(f"FakeTransport has {len(self._scripts)} scripts and no more")
        call = FakeCall(request, timeout_s, self._scripts[len(self.calls)])
        self.calls.append(call)
        return call

    def is_ready(self, model: str, timeout_s: float | None) -> bool:
        """Takes the next entry of `readiness`; the last one stays."""
        entry = self._readiness.pop(0) if len(self._readiness) > 1 else self._readiness[0]
        if isinstance(entry, BaseException):
            raise entry
        return entry

    def close(self) -> None:
        self.closed = True


def piece(
    text: str, *, finish_reason: str = "None", num_output_tokens: int = 1, **outputs: OutputValue
) -> WireResponse:
    """One response as the server sends it."""
    counts: dict[str, OutputValue] = {"num_input_tokens": 1, "num_output_tokens": num_output_tokens}
    return WireResponse({"text_output": text, "finish_reason": finish_reason, **counts, **outputs})


def answer(*texts: str, finish_reason: str = "stop") -> list[Step]:
    """The script of a request that succeeds: one response per text, the last one final."""
    *first, last = texts or ("",)
    return [*(piece(text) for text in first), piece(last, finish_reason=finish_reason)]
