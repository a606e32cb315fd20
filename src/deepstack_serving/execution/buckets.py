"""The sizes that steps are padded to: few enough to capture a graph for each."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Bucket:
    """One size: the steps that are padded to it, and its graph."""

    rows: int
    sequences: int
    max_query_length: int

    @property
    def is_decode(self) -> bool:
        return self.max_query_length == 1


def bucket_for(sizes: Sequence[int], size: int) -> int | None:
    """The smallest of the ascending `sizes` that holds `size`; None where it is beyond the largest."""
    place = bisect_left(sizes, size)
    return sizes[place] if place < len(sizes) else None


def needed_sizes(sizes: Sequence[int], largest: int) -> tuple[int, ...]:
    """Those of the ascending `sizes` that steps of up to `largest` are padded to."""
    smaller = tuple(size for size in sizes if size < largest)
    last = bucket_for(sizes, largest)
    return smaller if last is None else (*smaller, last)


def decode_bucket(sequences: int) -> Bucket:
    """Of decode steps: a row for each sequence."""
    return Bucket(sequences, sequences, 1)
