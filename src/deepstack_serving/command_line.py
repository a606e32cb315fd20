"""What the commands share: arguments that are settings too, and refusals as one line on standard error."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from deepstack_serving.errors import DeepstackError, SettingsError
from deepstack_serving.settings import RULES

MAX_STAGES = 8

Command = Callable[[argparse.Namespace], int]


def setting(key: str) -> Callable[[str], Any]:
    """An argument that is read by the rule of a setting."""

    def parse(text: str) -> Any:
        try:
            return RULES[key].parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is not allowed; allowed: {RULES[key].allowed}") from error

    return parse


def add_stage_arguments(parser: argparse.ArgumentParser) -> None:
    """`--stages` and `--split`; `check_split` compares them."""
    stages = f"language stages, 1 to {MAX_STAGES} (%(default)s)"
    parser.add_argument("--stages", type=_stage_count, default=2, metavar="N", help=stages)
    parser.add_argument("--split", type=_split, metavar="A,B", help="first layer of each later language stage")


def check_split(arguments: argparse.Namespace) -> None:
    """Raises SettingsError when `--split` is there and has not one point fewer than `--stages`."""
    points, wanted = arguments.split, arguments.stages - 1
    if points is not None and len(points) != wanted:
        raise SettingsError(
            f"--split {','.join(map(str, points))} has {len(points)} points, but --stages {arguments.stages} needs "
            f"{wanted}"
        )


def table(rows: Sequence[Sequence[str]]) -> str:
    """Lines of cells in columns, each as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines) + "\n"


def refusing(command: Command) -> Command:
    """The command, with exit code 1 and one line on standard error for an error that the user can mend."""

    def run(arguments: argparse.Namespace) -> int:
        try:
            return command(arguments)
        except DeepstackError as error:
            sys.stderr.write(f"error: {error}\n")
            return 1

    return run


def _stage_count(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= MAX_STAGES:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of stages from 1 to {MAX_STAGES}")
    return int(text)


def _split(text: str) -> tuple[int, ...]:
    points: tuple[int, ...] | None = setting("split_points")(text)
    if points is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of layer numbers, as in 9,18,27")
    return points
