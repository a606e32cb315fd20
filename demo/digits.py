"""The handwritten digits, split into train and held-out before anything else sees them.

Origin: the test set of "Optical Recognition of Handwritten Digits" (E. Alpaydin, C. Kaynak, 1998, UCI Machine
Learning Repository, doi 10.24432/C50P49, licence CC BY 4.0): 1,797 scans of 8x8 pixels with 17 grey levels, written by
13 people.
scikit-learn (BSD-3-Clause) ships the copy that is read here, so nothing is downloaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

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
def load_split(seed: int = SPLIT_SEED) -> Split:
    """Split the data set digit by digit, so that both sides hold every digit in the same share."""
    pixels, labels = load_digits(return_X_y=True)
    shuffle = np.random.default_rng(seed)
    held_out: list[int] = []
    for digit in range(10):
        rows = shuffle.permutation(np.flatnonzero(labels == digit))
        held_out += rows[: round(len(rows) * HELD_OUT_SHARE)].tolist()
    is_held_out = np.isin(np.arange(len(labels)), held_out)
    grey = np.rint(pixels.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    return Split(_take(grey, labels, ~is_held_out), _take(grey, labels, is_held_out))


def _take(pixels: NDArray[np.uint8], labels: NDArray[np.int64], chosen: NDArray[np.bool_]) -> Scans:
    rows = np.flatnonzero(chosen)
    return Scans(pixels[rows], labels[rows].astype(np.int64), rows.astype(np.int64))
