"""gRPC transport of the asynchronous client: one channel, one bidirectional stream per request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from deepstack_client.errors import RequestCancelledError
from deepstack_client.request import WireRequest
from deepstack_client.response import WireResponse
from deepstack_client.transports import grpc_codec


class AsyncGrpcExchange:
    def __init__(self, call: Any) -> None:
        self._call = call
        self._cancelled = False

    async def receive(self) -> WireResponse | None:
        try:
            message = await self._call.read()
        except grpc.RpcError as error:
            raise grpc_codec.error_from_rpc(error) from None
        except asyncio.CancelledError:
            if self._cancelled:  # by `cancel`, not because the awaiting task was cancelled
                raise RequestCancelledError("the request was cancelled") from None
            raise
        return None if message is grpc.aio.EOF else grpc_codec.decode_response(message)

    def cancel(self) -> None:
        self._cancelled = True
        self._call.cancel()


class AsyncGrpcTransport:
    """Any number of requests at once, all in one event loop: the one of the first request."""

    def __init__(self, host: str, port: int) -> None:
        self._target = grpc_codec.target(host, port)
        self._channel: Any = None

    def start(self, request: WireRequest, timeout_s: float | None) -> AsyncGrpcExchange:
        messages = _one(grpc_codec.encode_request(request))
        call = self._stub().ModelStreamInfer(messages, timeout=timeout_s, metadata=grpc_codec.METADATA)
        return AsyncGrpcExchange(call)

    async def is_ready(self, model: str, timeout_s: float | None) -> bool:
        stub = self._stub()
        try:
            server = await stub.ServerReady(service_pb2.ServerReadyRequest(), timeout=timeout_s)
            request = service_pb2.ModelReadyRequest(name=model)
            return bool(server.ready and (await stub.ModelReady(request, timeout=timeout_s)).ready)
        except grpc.RpcError as error:
            raise grpc_codec.error_from_rpc(error) from None

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()

    def _stub(self) -> Any:
        if self._channel is None:  # made here because a channel belongs to the event loop that runs now
            self._channel = grpc.aio.insecure_channel(self._target, options=grpc_codec.CHANNEL_OPTIONS)
        return service_pb2_grpc.GRPCInferenceServiceStub(self._channel)


async def _one(message: Any) -> AsyncIterator[Any]:
    yield message
