"""Rules for single values that come from outside: how a value is read, and what a refusal says is allowed."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

# Python's own reading also takes underscores, blanks and the digits of every script.
_INTEGER = re.compile(r"[+-]?[0-9]+")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


@dataclass(frozen=True)
class Rule:
    """`parse` returns the value or raises ValueError; `allowed` is the end of a sentence that says what fits."""

    parse: Callable[[Any], Any]
    allowed: str


def integer(minimum: int, maximum: int) -> Rule:
    """A whole number, or its decimal text."""

    def parse(value: Any) -> int:
        number = int(_matching(value, _INTEGER)) if isinstance(value, str) else value
        if isinstance(number, float) and number.is_integer():
            number = int(number)
        if isinstance(number, bool) or not isinstance(number, int) or not minimum <= number <= maximum:
            raise ValueError(value)
        return number

    return Rule(parse, f"a whole number from {minimum} to {maximum}")


def number(minimum: float, maximum: float, *, exclude_minimum: bool = False) -> Rule:
    """A number, or its decimal text."""

    def parse(value: Any) -> float:
        parsed = float(_matching(value, _NUMBER)) if isinstance(value, str) else value
        if isinstance(parsed, bool) or not isinstance(parsed, int | float) or not minimum <= parsed <= maximum:
            raise ValueError(value)
        if exclude_minimum and parsed == minimum:
            raise ValueError(value)
        return float(parsed)

    return Rule(parse, f"a number {'above' if exclude_minimum else 'from'} {minimum:g} and up to {maximum:g}")


def boolean() -> Rule:
    """true or false, or their texts."""

    def parse(value: Any) -> bool:
        text = str(value).lower() if isinstance(value, bool | str) else ""
        if text not in ("true", "false"):
            raise ValueError(value)
        return text == "true"

    return Rule(parse, "true or false")


def choice(*values: str) -> Rule:
    """One of some words."""

    def parse(value: Any) -> str:
        if value not in values:
            raise ValueError(value)
        return str(value)

    return Rule(parse, f"one of {', '.join(values)}")


def ascending(minimum: int, maximum: int) -> Rule:
    """Whole numbers separated by commas, each larger than the one before; 'none' for no number."""
    one = integer(minimum, maximum)

    def parse(value: Any) -> tuple[int, ...]:
        if value == "none":
            return ()
        numbers = tuple(one.parse(item.strip()) for item in str(value).split(","))
        if any(later <= earlier for earlier, later in pairwise(numbers)):
            raise ValueError(value)
        return numbers

    return Rule(parse, f"ascending whole numbers from {minimum} to {maximum} separated by commas, or none")


def _matching(text: str, form: re.Pattern[str]) -> str:
    if not form.fullmatch(text):
        raise ValueError(text)
    return text
