"""Command-line values that both benchmarks take."""

from __future__ import annotations

import argparse


def counts(text: str) -> tuple[int, ...]:
    """Numbers of clients: 1,4,16."""
    numbers = text.split(",")
    if not all(number.isdigit() and int(number) for number in numbers):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers from 1 up")
    return tuple(int(number) for number in numbers)


def variable(text: str) -> tuple[str, str]:
    """An environment variable of the server: NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value
