"""What a measured request is and gave: the JSON between the benchmark and its measuring processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.failures import BenchError
from bench.figures import MILLISECONDS, median


@dataclass(frozen=True)
class Case:
    """One request: a picture file, or none, and a question; exactly `max_tokens` tokens are generated."""

    picture: str | None
    question: str
    max_tokens: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Record:
    """Seconds from the request's start; `first_tokens` came at `first_s`, the last of `tokens` at `end_s`."""

    first_s: float
    end_s: float
    first_tokens: int
    tokens: int
    input_tokens: int
    text: str

    @staticmethod
    def parse(values: Mapping[str, Any]) -> Record:
        return Record(**values)

    @property
    def per_token_s(self) -> float:
        """Time per token after the first ones."""
        return (self.end_s - self.first_s) / (self.tokens - self.first_tokens)


def check(record: Record, case: Case) -> Record:
    """Raises BenchError when the request did not give the tokens that it was to give."""
    if record.tokens != case.max_tokens:
        raise BenchError(f"{record.tokens} tokens came instead of {case.max_tokens}")
    return record


def summary(records: Sequence[Record]) -> dict[str, Any]:
    """Figures of requests that ran one after another."""
    return {
        "first_token_ms": median([record.first_s for record in records]) * MILLISECONDS,
        "per_token_ms": median([record.per_token_s for record in records]) * MILLISECONDS,
        "tokens_per_s": tokens_per_s(records),
        "samples": [{**asdict(record), "text": record.text[:40]} for record in records],
    }


def tokens_per_s(records: Sequence[Record]) -> float:
    """Throughput of requests that ran one after another."""
    return sum(record.tokens for record in records) / sum(record.end_s for record in records)
