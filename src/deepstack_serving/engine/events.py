"""Messages to the output thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from deepstack_serving.engine.sequence import Sequence as Running
from deepstack_serving.errors import DeepstackError

Alternatives = tuple[Sequence[int], Sequence[float]]  # the most likely tokens and their log-probabilities, best first


class Begin(NamedTuple):
    """A request was accepted: watch it from now on."""

    sequence: Running


class Tokens(NamedTuple):
    """New tokens of a request, at least one; `finish_reason` is set with the last."""

    sequence: Running
    ids: Sequence[int]
    logprobs: Sequence[float]
    top: Sequence[Alternatives]  # of each token; empty where the request asks for none
    finish_reason: str | None
    ends_with_eos: bool  # the last one is an end-of-sequence token: counted, but not text


class Failure(NamedTuple):
    """A request ends with an error."""

    sequence: Running
    error: DeepstackError


Event = Begin | Tokens | Failure
