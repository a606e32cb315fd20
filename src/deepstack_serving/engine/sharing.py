"""One door to several pipelines: each request goes to the one that has the fewest open, and stays there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from deepstack_serving.engine.engine import Engine
from deepstack_serving.engine.orchestrator import Orchestrator
from deepstack_serving.engine.ports import Output, ReplyPort
from deepstack_serving.errors import DeepstackError


class SharedDoor:
    """Orchestrators of the same checkpoint, each with stages of its own. One that is not healthy gets requests only
    where none is; of equals, the one that had the fewest so far.
    """

    def __init__(self, orchestrators: Iterable[Orchestrator]) -> None:
        self._members = [_Member(orchestrator) for orchestrator in orchestrators]
        self._choosing = threading.Lock()

    @property
    def engines(self) -> Sequence[Engine]:
        """Those of all pipelines."""
        return [member.orchestrator.engine for member in self._members]

    @property
    def is_healthy(self) -> bool:
        """Whether all are."""
        return all(member.orchestrator.is_healthy for member in self._members)

    def start(self) -> None:
        """Start all."""
        for member in self._members:
            member.orchestrator.start()

    def submit(self, inputs: Mapping[str, list[Any]], parameters: Mapping[str, Any], reply: ReplyPort) -> None:
        """Validate and enqueue one request; see Orchestrator."""
        with self._choosing:
            member = min(self._members, key=_Member.order)
            counted = member.count(reply)
        member.orchestrator.submit(inputs, parameters, counted)

    def close(self) -> None:
        """End all; requests that are still open fail."""
        for member in self._members:
            member.orchestrator.close()


class _Member:
    def __init__(self, orchestrator: Orchestrator) -> None:
        self.orchestrator = orchestrator
        self.open_requests = self._given = 0
        self._counting = threading.Lock()

    def order(self) -> tuple[bool, int, int]:
        """The least gets the next request."""
        return not self.orchestrator.is_healthy, self.open_requests, self._given

    def count(self, reply: ReplyPort) -> ReplyPort:
        """The same reply, counted until it ends."""
        self._given += 1
        self._change(1)
        return _CountedReply(reply, lambda: self._change(-1))

    def _change(self, by: int) -> None:
        with self._counting:
            self.open_requests += by


class _CountedReply:
    """Calls `ended` once, with the first thing that is final."""

    def __init__(self, reply: ReplyPort, ended: Callable[[], None]) -> None:
        self._reply, self._ended = reply, ended
        self._ending = threading.Lock()  # never released: whoever gets it ends the reply

    def send(self, output: Output, *, final: bool) -> None:
        try:
            self._reply.send(output, final=final)
        finally:
            if final:
                self._end()

    def fail(self, error: DeepstackError) -> None:
        try:
            self._reply.fail(error)
        finally:
            self._end()

    def is_cancelled(self) -> bool:
        return self._reply.is_cancelled()

    def _end(self) -> None:
        if self._ending.acquire(blocking=False):
            self._ended()
