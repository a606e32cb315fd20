"""The handwritten digits, split into train and held-out before anything else sees them.

Origin: the test set of "Optical Recognition of Handwritten Digits" (E. Alpaydin, C. Kaynak, 1998, UCI Machine
Learning Repository, doi 10.24432/C50P49, licence CC BY 4.0): 1,797 scans of 8x8 pixels with 17 grey levels, written by
13 people.
scikit-learn (BSD-3-Clause) ships the copy that is read here, so nothing is downloaded. Where scikit-learn cannot be
installed, a file takes its place: `python -m demo.digits FILE.npz` writes it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

SPLIT_SEED = 20260101
HELD_OUT_SHARE = 0.2


@dataclass(frozen=True)
class Scans:
    """Scans as uint8 [count, 8, 8] (0 = paper, 255 = ink), their digits [count], and their rows in the data set."""

    pixels: NDArray[np.uint8]
    labels: NDArray[np.int64]
    rows: NDArray[np.int64]

    def positions_of(self, digit: int) -> NDArray[np.int64]:
        """Where in these arrays the scans of one digit stand."""
        return np.flatnonzero(self.labels == digit)


@dataclass(frozen=True)
class Split:
    """Two disjoint sets of scans with the same mix of digits."""

    train: Scans
    held_out: Scans


@cache
def load_split(file: Path | None = None, seed: int = SPLIT_SEED) -> Split:
    """Split the data set digit by digit, so that both sides hold every digit in the same share.

    It is read from `file` (see `write_digits`), or else from scikit-learn.
    """
    pixels, labels = _read_digits(file)
    shuffle = np.random.default_rng(seed)
    held_out: list[int] = []
    for digit in range(10):
        rows = shuffle.permutation(np.flatnonzero(labels == digit))
        held_out += rows[: round(len(rows) * HELD_OUT_SHARE)].tolist()
    is_held_out = np.isin(np.arange(len(labels)), held_out)
    grey = np.rint(pixels.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    return Split(_take(grey, labels, ~is_held_out), _take(grey, labels, is_held_out))


def write_digits(file: Path) -> None:
    """The data set as scikit-learn has it, for `load_split` on a machine without scikit-learn."""
    pixels, labels = _read_digits(None)
    np.savez_compressed(file, pixels=pixels.astype(np.uint8), labels=labels.astype(np.uint8))


def _read_digits(file: Path | None) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Pixels [count, 64], 0 to 16, and digits [count]."""
    if file is not None:
        stored = np.load(file)
        return stored["pixels"].astype(np.float64), stored["labels"].astype(np.int64)
    from sklearn.datasets import load_digits  # not everywhere installed

    pixels, labels = load_digits(return_X_y=True)
    return pixels, labels


def _take(pixels: NDArray[np.uint8], labels: NDArray[np.int64], chosen: NDArray[np.bool_]) -> Scans:
    rows = np.flatnonzero(chosen)
    return Scans(pixels[rows], labels[rows].astype(np.int64), rows.astype(np.int64))


if __name__ == "__main__":
    write_digits(Path(sys.argv[1]))
