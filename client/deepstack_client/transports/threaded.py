"""Lets the asynchronous client use a synchronous transport, with one thread per request under way.

Used for HTTP and for the fake transport. A shared pool would cap the number of concurrent streams, so there is none.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from deepstack_client.request import WireRequest
from deepstack_client.response import WireResponse
from deepstack_client.transports.base import Exchange, Transport


class ThreadedExchange:
    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="deepstack-exchange")

    async def receive(self) -> WireResponse | None:
        response = await asyncio.get_running_loop().run_in_executor(self._thread, self._exchange.receive)
        if response is None:
            self._thread.shutdown(wait=False)
        return response

    def cancel(self) -> None:
        self._exchange.cancel()
        self._thread.shutdown(wait=False)


class ThreadedTransport:
    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def start(self, request: WireRequest, timeout_s: float | None) -> ThreadedExchange:
        return ThreadedExchange(self._transport.start(request, timeout_s))

    async def is_ready(self, model: str, timeout_s: float | None) -> bool:
        return await asyncio.to_thread(self._transport.is_ready, model, timeout_s)

    async def close(self) -> None:
        await asyncio.to_thread(self._transport.close)
