"""Command-line values that several benchmarks take."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.serving import RESULTS


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


def names(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Reads some of the known names, separated by commas."""

    def parse(text: str) -> tuple[str, ...]:
        found = tuple(text.split(","))
        if not set(found) <= set(known):
            raise argparse.ArgumentTypeError(f"{text!r}; known: {', '.join(known)}")
        return found

    return parse


def add_output(parser: argparse.ArgumentParser) -> None:
    """`--output`: what git ignores, unless the results are to be kept."""
    text = "where the results go (%(default)s); bench/results is the folder of those that are kept in git"
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="DIR", help=text)
