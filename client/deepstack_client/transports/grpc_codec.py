"""Triton's gRPC messages: requests into them, responses and errors out of them. Shared by both gRPC transports.

The generated messages of tritonclient are used directly, with one channel per transport: tritonclient's own client
carries one stream at a time, a channel carries as many as there are requests.
"""

from __future__ import annotations

import re
import struct
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from deepstack_client.errors import (
    ClientError,
    ConnectError,
    InvalidRequestError,
    ProtocolError,
    RequestCancelledError,
    RequestTimeoutError,
    ServerError,
    ServerUnavailableError,
    error_from_text,
)
from deepstack_client.request import InputValue, WireRequest
from deepstack_client.response import OutputValue, WireResponse

METADATA = (("triton_grpc_error", "true"),)
"""Without this header Triton reports stream errors as text, without a status."""

CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_retries", 0),
    # A client that waits for a starting server must not sit out another client's growing back-off.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1000),
)

_SCALARS = {"FP32": "<f", "FP64": "<d", "UINT32": "<I", "INT32": "<i", "UINT64": "<Q", "INT64": "<q", "BOOL": "<?"}

# gRPC reports its own connection trouble with the status that a busy server uses too; only the text tells them apart.
_LOST_CONNECTION = re.compile(
    "failed to connect|connection (refused|reset|timed out)|dns resolution|name resolution|socket closed|stream removed"
    "|broken pipe|goaway|keepalive|recvmsg|tcp handshaker|endpoint closing",
    re.IGNORECASE,
)

_BY_STATUS: dict[grpc.StatusCode, type[ClientError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.NOT_FOUND: InvalidRequestError,
    grpc.StatusCode.UNAVAILABLE: ServerUnavailableError,
    grpc.StatusCode.CANCELLED: RequestCancelledError,
}


def target(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def encode_request(request: WireRequest) -> Any:
    message = service_pb2.ModelInferRequest(model_name=request.model, id=request.request_id)
    for name, text in request.parameters.items():
        message.parameters[name].string_param = text
    for name, value in request.inputs.items():
        datatype, count, content = _encode_value(value)
        message.inputs.add(name=name, datatype=datatype, shape=[count])
        message.raw_input_contents.append(content)
    return message


def decode_response(message: Any) -> WireResponse:
    if (
        message.error_message
    ):  # without a status in spite of METADATA: Triton refused the request before any model saw it
        raise error_from_text(message.error_message, InvalidRequestError)
    response = message.infer_response
    if len(response.outputs) != len(response.raw_output_contents):
        raise ProtocolError("a response lists outputs without their contents")
    pairs = zip(response.outputs, response.raw_output_contents, strict=True)
    return WireResponse(
        {output.name: _decode_value(output.name, output.datatype, content) for output, content in pairs}
    )


def error_from_rpc(error: Any) -> ClientError:
    """The typed error for a failed call. `error` is a grpc.RpcError, whose base class lacks these methods."""
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return RequestTimeoutError("the time limit of the request passed")
    if code is grpc.StatusCode.UNAVAILABLE and _LOST_CONNECTION.search(details):
        return ConnectError(f"no connection to the server: {details}")
    return error_from_text(details, _BY_STATUS.get(code, ServerError))


def _encode_value(value: InputValue) -> tuple[str, int, bytes]:
    """Data type, number of elements and raw contents."""
    if isinstance(value, bool):
        return "BOOL", 1, struct.pack("<?", value)
    if isinstance(value, int | float):
        datatype, layout = ("INT32", "<i") if isinstance(value, int) else ("FP32", "<f")
        return datatype, 1, struct.pack(layout, value)
    elements = (value.encode(),) if isinstance(value, str) else value
    return "BYTES", len(elements), b"".join(struct.pack("<I", len(element)) + element for element in elements)


def _decode_value(name: str, datatype: str, content: bytes) -> OutputValue:
    try:
        if datatype == "BYTES":
            (length,) = struct.unpack_from("<I", content)
            return content[4 : 4 + length].decode()
        value: OutputValue = struct.unpack_from(_SCALARS[datatype], content)[0]
    except (struct.error, KeyError, UnicodeDecodeError) as error:
        raise ProtocolError(f"output {name} of type {datatype} cannot be read") from error
    return value
