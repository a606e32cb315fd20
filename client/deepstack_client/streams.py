"""A request under way, as the caller sees it: an iterator of chunks that cancels the request when closed early.

Between the client, which starts it, and the transport's exchange; what the responses mean is the reader's business.
"""

from __future__ import annotations

from types import TracebackType

from deepstack_client.errors import RequestCancelledError
from deepstack_client.response import Chunk, Completion, ResponseReader
from deepstack_client.transports.base import AsyncExchange, Exchange


class _StreamState:
    """What both kinds of stream share: whose request it is, whether it is over, and how to give it up."""

    def __init__(self, exchange: Exchange | AsyncExchange, reader: ResponseReader) -> None:
        self._cancel = exchange.cancel
        self._reader = reader
        self._closed = False

    @property
    def request_id(self) -> str:
        return self._reader.request_id

    def close(self) -> None:
        """Cancels the request unless it has ended. Allowed from another thread."""
        if not self._reader.ended and not self._closed:
            self._closed = True
            self._cancel()

    def _check_open(self) -> None:
        if self._closed:
            raise RequestCancelledError("the stream has been closed")


class Stream(_StreamState):
    """Iterate for chunks; `completion()` reads what is left and gives the whole answer."""

    def __init__(self, exchange: Exchange, reader: ResponseReader) -> None:
        super().__init__(exchange, reader)
        self._exchange = exchange

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Chunk:
        while not self._reader.ended:
            self._check_open()
            try:
                chunk = self._reader.feed(self._exchange.receive())
            except BaseException:  # Ctrl-C included: no request runs on without a reader
                self.close()
                raise
            if chunk is not None:
                return chunk
        raise StopIteration

    def completion(self) -> Completion:
        for _ in self:
            pass
        return self._reader.completion()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class AsyncStream(_StreamState):
    """The same with `async for`, `async with` and `await stream.completion()`."""

    def __init__(self, exchange: AsyncExchange, reader: ResponseReader) -> None:
        super().__init__(exchange, reader)
        self._exchange = exchange

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> Chunk:
        while not self._reader.ended:
            self._check_open()
            try:
                chunk = self._reader.feed(await self._exchange.receive())
            except BaseException:  # a cancelled task included: no request runs on without a reader
                self.close()
                raise
            if chunk is not None:
                return chunk
        raise StopAsyncIteration

    async def completion(self) -> Completion:
        async for _ in self:
            pass
        return self._reader.completion()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
