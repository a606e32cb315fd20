"""Parse `sampling_parameters`: a JSON object, or else request parameters of the same names.

Unknown names are refused in both, and so are request parameters beside the JSON: none is silently left out.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deepstack_serving.errors import InvalidRequestError, shown
from deepstack_serving.rules import Rule, boolean, integer, number

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16


@dataclass(frozen=True)
class SamplingParameters:
    """How to choose tokens. `max_tokens` None leaves it to the server's default; `logprobs` 0 asks for none."""

    max_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int = 0

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


def _stop(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if (
        isinstance(texts, list)
        and len(texts) <= MAX_STOP_STRINGS
        and all(isinstance(item, str) and item for item in texts)
    ):
        return tuple(texts)
    raise ValueError(value)


_OFF_OR_COUNT = integer(-1, 2**31 - 1)

_RULES: dict[str, Rule] = {
    "max_tokens": integer(1, 2**31 - 1),
    "temperature": number(0, 100),
    "top_k": Rule(lambda value: max(_OFF_OR_COUNT.parse(value), 0), f"{_OFF_OR_COUNT.allowed}; -1 and 0 are off"),
    "top_p": number(0, 1),
    "min_p": number(0, 1),
    "seed": integer(-(2**63), 2**63 - 1),
    "stop": Rule(_stop, f"a non-empty string, or a list of at most {MAX_STOP_STRINGS} of them"),
    "ignore_eos": boolean(),
    "logprobs": integer(0, MAX_LOGPROBS),
    "n": Rule(integer(1, 1).parse, "1: send one request for each answer"),
}


def parse_sampling(text: str | None, parameters: Mapping[str, Any], defaults: SamplingParameters) -> SamplingParameters:
    """The JSON text or the request parameters, over the checkpoint's defaults. Raises InvalidRequestError."""
    for name in parameters:
        _rule("request parameter", name)
    if text is not None and parameters:
        names = ", ".join(map(repr, sorted(parameters)))
        raise InvalidRequestError(f"the request parameters {names} came beside 'sampling_parameters': put all into one")
    values = parameters if text is None else _object(text)
    parsed = {name: _parse(name, value) for name, value in values.items() if value is not None}
    parsed.pop("n", None)
    if "seed" not in parsed:
        parsed["seed"] = secrets.randbits(63)
    return SamplingParameters(**{**defaults.__dict__, **parsed})


def _object(text: str) -> dict[str, Any]:
    try:
        values = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError) as error:  # a number too long to read is a plain ValueError
        raise InvalidRequestError(f"'sampling_parameters' is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise InvalidRequestError("'sampling_parameters' must be a JSON object")
    return values


def _rule(kind: str, name: str) -> Rule:
    rule = _RULES.get(name)
    if rule is None:
        raise InvalidRequestError(f"unknown {kind} {shown(name)}; known: {', '.join(sorted(_RULES))}")
    return rule


def _parse(name: str, value: Any) -> Any:
    rule = _rule("sampling parameter", name)
    try:
        return rule.parse(value)
    except (ValueError, OverflowError) as error:
        raise InvalidRequestError(f"sampling parameter {name!r} is {shown(value)}; allowed: {rule.allowed}") from error
