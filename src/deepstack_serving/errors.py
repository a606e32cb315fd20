"""Every error that a user or an operator can meet, as one tree.

An error carries a code; the bridge maps the code to Triton's, once. Because Triton's BLS drops the code of a called
model on older servers, the code also travels as a prefix of the text (`to_wire`, `from_wire`).
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

_LONGEST_SHOWN = 100


class ErrorCode(StrEnum):
    """Names of Triton's error codes that this project uses."""

    INVALID_ARG = "INVALID_ARG"
    UNAVAILABLE = "UNAVAILABLE"
    CANCELLED = "CANCELLED"
    INTERNAL = "INTERNAL"


def shown(value: object) -> str:
    """What a client sent as an error's text shows it: its repr, of which a long one is cut."""
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}... ({len(text)} characters)"


class DeepstackError(Exception):
    """Base of all errors of this project. The text says what is wrong and what the caller can do."""

    code: ClassVar[ErrorCode] = ErrorCode.INTERNAL

    def to_wire(self) -> str:
        """The text that crosses to another process."""
        return f"[{self.code}] {self}"


class SettingsError(DeepstackError):
    """A setting is unknown or has a value that is not allowed. Raised while loading."""

    code = ErrorCode.INVALID_ARG


class CheckpointError(DeepstackError):
    """A checkpoint folder cannot be served: a missing or contradictory file. Raised while loading."""

    code = ErrorCode.INVALID_ARG


class InvalidRequestError(DeepstackError):
    """The request cannot be served as it is; changing the request helps, sending it again does not."""

    code = ErrorCode.INVALID_ARG


class WireError(InvalidRequestError):
    """A tensor between two processes is missing, unexpected or ill-fitting."""


class UnavailableError(DeepstackError):
    """The server cannot serve this now: overloaded, starting, draining or too late. Sending it again may help."""

    code = ErrorCode.UNAVAILABLE


class CancelledError(DeepstackError):
    """The caller cancelled the request."""

    code = ErrorCode.CANCELLED


class StageError(DeepstackError):
    """A stage failed while it served a valid call."""


_BY_CODE: dict[str, type[DeepstackError]] = {
    ErrorCode.INVALID_ARG: InvalidRequestError,
    ErrorCode.UNAVAILABLE: UnavailableError,
    ErrorCode.CANCELLED: CancelledError,
    ErrorCode.INTERNAL: StageError,
}


def from_wire(text: str) -> DeepstackError:
    """The error that another process sent by `to_wire`; a text without a code becomes a StageError."""
    prefix, closed, message = text.partition("] ")
    kind = _BY_CODE.get(prefix.removeprefix("[")) if closed and prefix.startswith("[") else None
    return kind(message) if kind else StageError(text)
