"""The client library on stages of this process: a transport to a LocalServer, and an audit on it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from deepstack_client import Client, ServerError
from deepstack_client.request import InputValue, WireRequest
from deepstack_client.response import WireResponse
from deepstack_serving.audit.asking import describe, record
from deepstack_serving.audit.cases import cases
from deepstack_serving.audit.verdict import Audit, judge
from deepstack_serving.engine.ports import Output
from tests.support.local import CollectingReply, LocalServer


@dataclass
class LocalExchange:
    """One request; its responses come once all of them are there."""

    reply: CollectingReply
    _left: list[Output] | None = field(default=None, repr=False)

    def receive(self) -> WireResponse | None:
        if self._left is None:
            self.reply.wait()
            self._left = list(self.reply.outputs)
            if self.reply.error is not None:
                raise ServerError(str(self.reply.error))
        return _response(self._left.pop(0)) if self._left else None

    def cancel(self) -> None:
        self.reply.cancelled = True


@dataclass(frozen=True)
class LocalTransport:
    """Implements the client's Transport."""

    server: LocalServer

    def start(self, request: WireRequest, timeout_s: float | None) -> LocalExchange:
        inputs = {name: _elements(value) for name, value in request.inputs.items()}
        return LocalExchange(self.server.submit(inputs, **request.parameters))

    def is_ready(self, model: str, timeout_s: float | None) -> bool:
        return self.server.orchestrator.is_healthy

    def close(self) -> None:
        """The server is the caller's."""


def _elements(value: InputValue) -> list[Any]:
    return list(value) if isinstance(value, tuple) else [value]


def _response(output: Output) -> WireResponse:
    return WireResponse(
        {
            "text_output": output.text,
            "finish_reason": str(output.finish_reason),
            "logprobs": json.dumps(output.logprobs),
            "num_input_tokens": output.input_tokens,
            "num_output_tokens": output.output_tokens,
        }
    )


def audit(server: LocalServer, max_tokens: int = 2) -> Audit:
    """`deepstack audit`; the server has the setting."""
    client = Client(transport=LocalTransport(server))
    described = describe(client)
    return judge(record(client, described, cases(), max_tokens, lambda _: None), cases(), described)
