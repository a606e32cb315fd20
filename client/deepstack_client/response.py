"""Reading responses, without any I/O: the outputs of the `orchestrator` model become chunks and a completion.

Last station of a request's path. The reader also guards the contract: exactly one final response, nothing after it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from deepstack_client.errors import ProtocolError

OutputValue = str | int | float | bool
Value = TypeVar("Value", str, int)


@dataclass(frozen=True)
class WireResponse:
    """One response after deserialisation; every output is a single value. Without outputs it only marks an end."""

    outputs: Mapping[str, OutputValue]


@dataclass(frozen=True)
class Chunk:
    """A piece of the answer. `finish_reason` is None in all but the last one."""

    text: str
    finish_reason: str | None = None
    num_output_tokens: int = 0
    logprobs: tuple[object, ...] = ()


@dataclass(frozen=True)
class Completion:
    """The whole answer. Log-probabilities are there when the request asked for them; one entry per token."""

    text: str
    finish_reason: str
    num_input_tokens: int
    num_output_tokens: int
    request_id: str
    cumulative_logprob: float | None = None
    logprobs: tuple[object, ...] = ()


@dataclass
class ResponseReader:
    """Feed it what arrives, then None for the end of the stream; it gives the chunks and, once ended, the completion.

    The last chunk is held back until the stream has ended, so that a caller who stops at it leaves nothing running:
    a cancellation that crosses a final response is the one thing a server should never have to handle.
    """

    request_id: str
    ended: bool = False
    _chunks: list[Chunk] = field(default_factory=list)
    _num_input_tokens: int = 0
    _cumulative_logprob: float | None = None

    def feed(self, response: WireResponse | None) -> Chunk | None:
        if response is None:
            return self._end()
        if not response.outputs:
            return None
        if self._final is not None:
            raise ProtocolError("the server sent a response after the final one")
        self._chunks.append(self._read(response.outputs))
        return None if self._final else self._chunks[-1]

    def completion(self) -> Completion:
        if self._final is None or not self.ended:
            raise ProtocolError("the stream has not ended")
        return Completion(
            text="".join(chunk.text for chunk in self._chunks),
            finish_reason=self._final.finish_reason or "",
            num_input_tokens=self._num_input_tokens,
            num_output_tokens=sum(chunk.num_output_tokens for chunk in self._chunks),
            request_id=self.request_id,
            cumulative_logprob=self._cumulative_logprob,
            logprobs=tuple(entry for chunk in self._chunks for entry in chunk.logprobs),
        )

    @property
    def _final(self) -> Chunk | None:
        return self._chunks[-1] if self._chunks and self._chunks[-1].finish_reason else None

    def _end(self) -> Chunk:
        if self._final is None:
            raise ProtocolError("the stream ended without a final response")
        self.ended = True
        return self._final

    def _read(self, outputs: Mapping[str, OutputValue]) -> Chunk:
        self._num_input_tokens = _value(outputs, "num_input_tokens", int, self._num_input_tokens)
        self._cumulative_logprob = _number(outputs, "cumulative_logprob", self._cumulative_logprob)
        finish_reason = _value(outputs, "finish_reason", str, "None")
        return Chunk(
            text=_value(outputs, "text_output", str, ""),
            finish_reason=None if finish_reason in ("None", "") else finish_reason,
            num_output_tokens=_value(outputs, "num_output_tokens", int, 0),
            logprobs=_logprobs(_value(outputs, "logprobs", str, "[]")),
        )


def _value(outputs: Mapping[str, OutputValue], name: str, kind: type[Value], default: Value) -> Value:
    value = outputs.get(name, default)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ProtocolError(f"output {name} should be {kind.__name__}, the server sent {value!r}")
    return value


def _number(outputs: Mapping[str, OutputValue], name: str, default: float | None) -> float | None:
    value = outputs.get(name, default)
    if isinstance(value, str | bool):
        raise ProtocolError(f"output {name} should be a number, the server sent {value!r}")
    return value


def _logprobs(text: str) -> tuple[object, ...]:
    try:
        entries = json.loads(text)
    except ValueError as error:
        raise ProtocolError(f"output logprobs is not JSON: {error}") from error
    if entries is None:
        return ()
    if not isinstance(entries, list):
        raise ProtocolError(f"output logprobs should be a JSON list, the server sent {text[:80]}")
    return tuple(entries)
