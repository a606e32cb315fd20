"""Talks to a running server's HTTP control and metrics endpoints.

Plain `http.client` serves: these are a handful of small JSON calls to this machine, which no proxy setting must divert.
"""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from deepstack_serving.embedded.failures import ModelLoadError
from deepstack_serving.errors import StageError, UnavailableError, from_wire

_SHORT_CALL_S = 10.0
_START_POLL_S = 1.0
_TRITON_METRIC = b"nv_"
_OK = 200
_STATE = re.compile(r"version \d+ is at UNAVAILABLE state: ")
_TRACEBACK = "\n\nAt:\n"


@dataclass(frozen=True, slots=True)
class Control:
    """One server's control endpoints. Every call raises UnavailableError when the server does not answer."""

    http_address: str
    metrics_address: str

    def answers_as(self, server_id: str) -> bool:
        """Whether all endpoints are up and belong to the server of this name, not to one that took the same port.

        The metrics endpoint opens last; a server that finds its port taken ends although it has answered before.
        """
        try:
            identity = json.loads(self._call("GET", "/v2", _START_POLL_S).body)
            metrics = _call(self.metrics_address, "GET", "/metrics", _START_POLL_S).body
        except (UnavailableError, ValueError):
            return False
        return isinstance(identity, dict) and identity.get("name") == server_id and _TRITON_METRIC in metrics

    def load(self, model: str, timeout_s: float) -> None:
        """Load one model by name; returns when it is ready."""
        reply = self._call("POST", f"{_model_path(model)}/load", timeout_s)
        if reply.status != _OK:
            raise ModelLoadError({model: load_failure_reason(_error_text(reply.body))})

    def unload(self, model: str) -> None:
        """Refuse new requests to one model and unload it when its running ones have ended; returns at once."""
        self._call("POST", f"{_model_path(model)}/unload")

    def is_model_ready(self, model: str) -> bool:
        return self._call("GET", f"/v2/models/{quote(model)}/ready").status == _OK

    def generate(self, model: str, inputs: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """One whole answer of a decoupled model. Raises the model's own error, whatever the HTTP status."""
        reply = self._call("POST", f"/v2/models/{quote(model)}/generate", timeout_s, json.dumps(inputs))
        content: dict[str, Any] = json.loads(reply.body)
        if "error" not in content:
            return content
        error = from_wire(str(content["error"]))
        if isinstance(error, StageError) and not self.is_model_ready(model):
            raise UnavailableError(f"model {model!r} is not ready: {error}")
        raise error

    def gauge(self, name: str) -> float | None:
        """The sum of one metric over its labels; None when the server does not have that metric."""
        reply = _call(self.metrics_address, "GET", "/metrics", _SHORT_CALL_S)
        return sum_of_metric(reply.body.decode(), name)

    def _call(self, method: str, path: str, timeout_s: float = _SHORT_CALL_S, body: str = "") -> _Reply:
        return _call(self.http_address, method, path, timeout_s, body)


@dataclass(frozen=True, slots=True)
class _Reply:
    status: int
    body: bytes


def sum_of_metric(exposition: str, name: str) -> float | None:
    """Read one metric from Prometheus text."""
    sample = re.compile(rf"^{re.escape(name)}(?:\{{[^\n]*\}})? (\S+)", re.MULTILINE)
    values = [float(value) for value in sample.findall(exposition)]
    return sum(values) if values else None


def load_failure_reason(text: str) -> str:
    """The model's own words in the server's report of a failed load, without the traceback."""
    reason = _STATE.split(text, maxsplit=1)[-1].partition(_TRACEBACK)[0]
    return reason.removeprefix("Internal: ").strip(" ;\n")


def _call(address: str, method: str, path: str, timeout_s: float, body: str = "") -> _Reply:
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=timeout_s)
    try:
        connection.request(method, path, body)
        response = connection.getresponse()
        return _Reply(response.status, response.read())
    except (OSError, http.client.HTTPException) as error:
        raise UnavailableError(f"no answer from the server at {address} to {method} {path}: {error!r}") from error
    finally:
        connection.close()


def _model_path(model: str) -> str:
    return f"/v2/repository/models/{quote(model)}"


def _error_text(body: bytes) -> str:
    try:
        content: Any = json.loads(body)
    except ValueError:
        return body.decode(errors="replace")
    return str(content.get("error", content)) if isinstance(content, dict) else str(content)
