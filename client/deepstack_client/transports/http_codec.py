"""Triton's generate and generate_stream endpoints as bytes: requests into JSON, responses out of bodies and events.

Errors come in three shapes: a JSON body with an HTTP status, `{"error": ...}` under 200, and the same inside an event.
"""

from __future__ import annotations

import json

from deepstack_client.errors import (
    ClientError,
    InvalidRequestError,
    ProtocolError,
    RequestTimeoutError,
    ServerError,
    ServerUnavailableError,
    error_from_text,
)
from deepstack_client.images import to_base64
from deepstack_client.request import InputValue, WireRequest
from deepstack_client.response import WireResponse

_BY_STATUS: dict[int, type[ClientError]] = {
    400: InvalidRequestError,
    404: InvalidRequestError,
    408: RequestTimeoutError,
    413: InvalidRequestError,
    429: ServerUnavailableError,
    503: ServerUnavailableError,
    504: RequestTimeoutError,
}


def encode_request(request: WireRequest) -> tuple[str, bytes]:
    """Path and JSON body."""
    endpoint = "generate_stream" if request.stream else "generate"
    inputs = {name: _json_value(value) for name, value in request.inputs.items()}
    body = {"id": request.request_id, **request.parameters, **inputs}  # Triton takes what is no input for a parameter
    return f"/v2/models/{request.model}/{endpoint}", json.dumps(body).encode()


def decode_response(body: bytes) -> WireResponse:
    """The response in a body or an event; an error in it is raised."""
    try:
        document = json.loads(body)
    except ValueError as error:
        raise ProtocolError(f"the server sent no JSON: {body[:80]!r}") from error
    if not isinstance(document, dict):
        raise ProtocolError(f"the server sent no JSON object: {body[:80]!r}")
    if "error" in document:
        raise error_from_text(str(document["error"]))
    return WireResponse(document)


def error_from_status(status: int, body: bytes) -> ClientError:
    """The typed error for an HTTP status other than 200. generate_stream puts even this body into an event."""
    body = b"".join(EventParser().feed(body + b"\n\n")) or body
    text = body.decode(errors="replace").strip()
    try:
        document = json.loads(body)
    except ValueError:
        document = None
    if isinstance(document, dict) and "error" in document:
        text = str(document["error"])
    return error_from_text(text or f"HTTP status {status}", _BY_STATUS.get(status, ServerError))


class EventParser:
    """Splits a server-sent event stream into payloads, however the bytes arrive."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads completed by these bytes. b"" is the end: it completes an event that lacks its blank line."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if not data:
            lines += [self._rest, b""]
        payloads = (self._take(line.removesuffix(b"\r")) for line in lines)
        return [payload for payload in payloads if payload]

    def _take(self, line: bytes) -> bytes:
        if line.startswith(b"data:"):
            self._data.append(line.removeprefix(b"data:").removeprefix(b" "))
        if line or not self._data:
            return b""
        payload, self._data = b"\n".join(self._data), []
        return payload


def _json_value(value: InputValue) -> object:
    return value if isinstance(value, bool | int | float | str) else [to_base64(element) for element in value]
