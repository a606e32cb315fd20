"""Percentiles, medians and the text tables that both benchmarks print."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

MILLISECONDS = 1e3


def percentile(values: Sequence[float], percent: float) -> float:
    """By linear interpolation between the two nearest values. Raises ValueError without values."""
    if not values:
        raise ValueError("a percentile of no values")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def median(values: Sequence[float]) -> float:
    """Raises statistics.StatisticsError without values."""
    return statistics.median(values)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table that reads well as plain text too: columns are padded, numbers stand on the right."""
    texts = [[_cell(value) for value in row] for row in rows]
    widths = [max(len(line[column]) for line in [list(header), *texts]) for column in range(len(header))]
    right = [all(isinstance(row[column], int | float | None) for row in rows) for column in range(len(header))]
    rule = ["-" * (width - 1) + (":" if is_right else "-") for width, is_right in zip(widths, right, strict=True)]
    lines = [_line(header, widths, right), "| " + " | ".join(rule) + " |"]
    return "\n".join([*lines, *(_line(row, widths, right) for row in texts)])


def _line(cells: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    padded = (
        cell.rjust(width) if is_right else cell.ljust(width)
        for cell, width, is_right in zip(cells, widths, right, strict=True)
    )
    return "| " + " | ".join(padded) + " |"


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
    return str(value)
