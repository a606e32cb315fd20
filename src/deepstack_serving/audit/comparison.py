"""Two answers to the same request: where their tokens part, and how far apart their log-probabilities are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

LIKELY = -5.0  # log-probability of a token that counts where a tolerance is allowed


@dataclass(frozen=True)
class Token:
    """A token of an answer, its log-probability, and those of the likeliest tokens in its place, itself included."""

    id: int
    logprob: float
    likeliest: Mapping[int, float]


@dataclass(frozen=True)
class Answer:
    """A whole answer, and the length of the prompt with its pictures."""

    tokens: tuple[Token, ...]
    prompt_tokens: int = 0

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(token.id for token in self.tokens)


@dataclass(frozen=True)
class Difference:
    """Log-probabilities are compared as far as both answers have the same tokens before.

    first: place of the first token that differs, None for the same ids. largest: of the log-probabilities of all tokens
    that they list. likely: of their own tokens and of those that are LIKELY; the others of a sure model are far below,
    where number types are coarse. gap: at `first`, how far apart the two tokens are in the answer that is less sure of
    its own; infinite where neither lists the other's.
    """

    first: int | None
    largest: float
    likely: float
    gap: float = 0.0

    @property
    def is_none(self) -> bool:
        return self.first is None and self.largest == 0

    def within(self, tolerance: float) -> bool:
        """The same up to `tolerance`, in which the likeliest two tokens may change places; 0: the same exactly."""
        if tolerance == 0:
            return self.is_none
        return self.likely <= tolerance and self.gap <= tolerance


def compare(one: Answer, other: Answer) -> Difference:
    """Symmetric."""
    pairs = list(zip(one.tokens, other.tokens, strict=False))
    first = next((place for place, (mine, theirs) in enumerate(pairs) if mine.id != theirs.id), None)
    comparable = pairs if first is None else pairs[: first + 1]
    largest = max((_apart(*pair) for pair in comparable), default=0.0)
    likely = max((_apart(*pair, LIKELY) for pair in comparable), default=0.0)
    if first is not None:
        return Difference(first, largest, likely, min(_gap(*comparable[-1]), _gap(*comparable[-1][::-1])))
    if len(one.tokens) != len(other.tokens):
        return Difference(len(pairs), largest, likely, math.inf)
    return Difference(None, largest, likely)


def _apart(mine: Token, theirs: Token, floor: float = -math.inf) -> float:
    """The largest difference of tokens that are above the floor in one of them, and of their own.

    Of a token that only one lists, the other says that it is at most as likely as the last that it lists itself.
    """
    differences = [0.0]
    for one, other in ((mine, theirs), (theirs, mine)):
        last = min(other.likeliest.values())
        counted = {token: value for token, value in one.likeliest.items() if value >= floor or token == one.id}
        for token, value in counted.items():
            differences.append(abs(value - other.likeliest[token]) if token in other.likeliest else value - last)
    return max(differences)


def _gap(token: Token, other: Token) -> float:
    return token.logprob - token.likeliest.get(other.id, -math.inf)
