"""gRPC transport of the synchronous client: one channel, one bidirectional stream per request."""

from __future__ import annotations

from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from deepstack_client.request import WireRequest
from deepstack_client.response import WireResponse
from deepstack_client.transports import grpc_codec


class GrpcExchange:
    def __init__(self, call: Any) -> None:
        self._call = call

    def receive(self) -> WireResponse | None:
        try:
            message = next(self._call, None)
        except grpc.RpcError as error:
            raise grpc_codec.error_from_rpc(error) from None
        return None if message is None else grpc_codec.decode_response(message)

    def cancel(self) -> None:
        self._call.cancel()


class GrpcTransport:
    """Any number of requests at once, from any thread."""

    def __init__(self, host: str, port: int) -> None:
        self._channel = grpc.insecure_channel(grpc_codec.target(host, port), options=grpc_codec.CHANNEL_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def start(self, request: WireRequest, timeout_s: float | None) -> GrpcExchange:
        message = grpc_codec.encode_request(request)
        return GrpcExchange(
            self._stub.ModelStreamInfer(iter([message]), timeout=timeout_s, metadata=grpc_codec.METADATA)
        )

    def is_ready(self, model: str, timeout_s: float | None) -> bool:
        try:
            server = self._stub.ServerReady(service_pb2.ServerReadyRequest(), timeout=timeout_s)
            request = service_pb2.ModelReadyRequest(name=model)
            return bool(server.ready and self._stub.ModelReady(request, timeout=timeout_s).ready)
        except grpc.RpcError as error:
            raise grpc_codec.error_from_rpc(error) from None

    def close(self) -> None:
        self._channel.close()
