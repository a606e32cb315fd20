"""The asynchronous client: the same as `Client` for asyncio, on the same request factory and reader."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from deepstack_client.client import DEFAULT_ADDRESS, DEFAULT_TIMEOUT_S
from deepstack_client.errors import ClientError
from deepstack_client.images import ImageSource
from deepstack_client.readiness import PROBE_TIMEOUT_S, ReadinessWait
from deepstack_client.request import Message, RequestFactory, RequestOptions
from deepstack_client.response import Completion, ResponseReader
from deepstack_client.streams import AsyncStream
from deepstack_client.transports import async_transport_for
from deepstack_client.transports.base import AsyncTransport

if TYPE_CHECKING:
    from typing_extensions import Unpack


class AsyncClient:
    """Talks to one server from one event loop. Cancelling the task that awaits an answer cancels the request."""

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        model: str = "orchestrator",
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
        transport: AsyncTransport | None = None,
    ) -> None:
        self._factory = RequestFactory(model, timeout_s)
        self._transport = async_transport_for(address) if transport is None else transport

    async def generate(
        self, prompt: str | Sequence[Message], images: Iterable[ImageSource] = (), **options: Unpack[RequestOptions]
    ) -> Completion:
        async with self._start(prompt, images, False, options) as stream:
            return await stream.completion()

    def stream(
        self, prompt: str | Sequence[Message], images: Iterable[ImageSource] = (), **options: Unpack[RequestOptions]
    ) -> AsyncStream:
        """Not awaited itself: `async with client.stream(...) as stream`. Call it inside a running event loop."""
        return self._start(prompt, images, True, options)

    async def is_ready(self) -> bool:
        try:
            return await self._transport.is_ready(self._factory.model, PROBE_TIMEOUT_S)
        except ClientError:
            return False

    async def wait_until_ready(self, timeout_s: float) -> None:
        wait = ReadinessWait(self._factory.model, timeout_s)
        while not await self._probe(wait):
            await asyncio.sleep(wait.pause_s())

    async def close(self) -> None:
        await self._transport.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def _start(
        self, prompt: str | Sequence[Message], images: Iterable[ImageSource], stream: bool, options: RequestOptions
    ) -> AsyncStream:
        request, timeout_s = self._factory.build(prompt, images, stream, options)
        return AsyncStream(self._transport.start(request, timeout_s), ResponseReader(request.request_id))

    async def _probe(self, wait: ReadinessWait) -> bool:
        try:
            return await self._transport.is_ready(self._factory.model, wait.probe_timeout_s)
        except ClientError as error:
            wait.last_error = error
            return False
