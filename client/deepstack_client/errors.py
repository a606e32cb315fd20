"""Every error that a user of the client can meet, and the one place where a server's error text becomes one of them.

The server begins its texts with a code in brackets (`[INVALID_ARG] ...`): some of Triton's paths lose the status.
The code decides; a text without one is judged by the status that the transport saw.
"""

from __future__ import annotations

import re

_CODED_TEXT = re.compile(r"(?:\[request id: [^\]]*\] )?\[([A-Z_]+)\] (.*)", re.DOTALL)
_MODEL_NOT_LOADED = "Request for unknown model"  # Triton's words for a model that is starting, draining or not there


class ClientError(Exception):
    """Base of all errors of this package."""


class ConnectError(ClientError):
    """The server cannot be reached, or the connection broke."""


class RequestTimeoutError(ClientError):
    """The time limit passed before the answer was complete. The request has been cancelled."""


class InvalidRequestError(ClientError):
    """The request cannot be served as it is; changing it helps, sending it again does not."""


class ServerUnavailableError(ClientError):
    """The server cannot serve this now: overloaded, starting or draining. Sending it again later may help."""


class RequestCancelledError(ClientError):
    """The request was cancelled, here or by the server."""


class ServerError(ClientError):
    """The server failed while it served a valid request."""


class ProtocolError(ClientError):
    """The server's responses break the contract, for example a stream that ended without a final response."""


_BY_CODE: dict[str, type[ClientError]] = {
    "INVALID_ARG": InvalidRequestError,
    "NOT_FOUND": InvalidRequestError,
    "UNSUPPORTED": InvalidRequestError,
    "UNAVAILABLE": ServerUnavailableError,
    "CANCELLED": RequestCancelledError,
    "INTERNAL": ServerError,
}


def error_from_text(text: str, otherwise: type[ClientError] = ServerError) -> ClientError:
    """The typed error for a server's text; `otherwise` is what the status says about one without a code."""
    if text.startswith(_MODEL_NOT_LOADED):
        return ServerUnavailableError(text)
    coded = _CODED_TEXT.match(text)
    kind = _BY_CODE.get(coded[1]) if coded else None
    if coded is None or kind is None:
        return otherwise(text or "the server gave no reason")
    return kind(coded[2])
