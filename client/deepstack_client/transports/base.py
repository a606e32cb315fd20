"""What the clients ask of a transport: carry one request there and its responses back.

`start` never blocks: connecting and sending may wait for the first `receive`. Errors are raised as `ClientError`s.
"""

from __future__ import annotations

from typing import Protocol

from deepstack_client.request import WireRequest
from deepstack_client.response import WireResponse


class Exchange(Protocol):
    """One request under way."""

    def receive(self) -> WireResponse | None:
        """The next response; None when the server has closed the stream."""

    def cancel(self) -> None:
        """Give the request up. Allowed from any thread and at any time; a blocked `receive` then raises."""


class Transport(Protocol):
    def start(self, request: WireRequest, timeout_s: float | None) -> Exchange: ...

    def is_ready(self, model: str, timeout_s: float | None) -> bool: ...

    def close(self) -> None: ...


class AsyncExchange(Protocol):
    async def receive(self) -> WireResponse | None: ...

    def cancel(self) -> None: ...


class AsyncTransport(Protocol):
    def start(self, request: WireRequest, timeout_s: float | None) -> AsyncExchange: ...

    async def is_ready(self, model: str, timeout_s: float | None) -> bool: ...

    async def close(self) -> None: ...
