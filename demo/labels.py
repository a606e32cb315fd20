"""What stands in each cell of a picture, for the probes of training (learner.py).

A cell is the square that one feature vector describes: an image token's or a vision patch's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from demo.pictures import COLOURS, PLACES, SHAPES, Box, Scene

LABEL_COUNTS = (11, 7, 1 + len(PLACES), 1 + len(COLOURS), 1 + len(SHAPES))
"""Known of a cell, 0 for nothing: its digit, which one of the number that is; the side, colour, shape of the mark."""
SMALLEST_OVERLAP = 0.2


@dataclass(frozen=True)
class Canvas:
    """Where a picture lies: scaled by `scale` (across, down), moved by `offset` (pixels), under `grid` (rows, columns)
    cells of `cell_px`."""

    scale: tuple[float, float]
    grid: tuple[int, int]
    cell_px: int
    offset: tuple[int, int] = (0, 0)


def cell_labels(scene: Scene, canvas: Canvas) -> NDArray[np.int64]:
    """[cells, len(LABEL_COUNTS)], cells row by row."""
    digits = np.stack([_overlap(box, canvas) for box in scene.digits])
    nearest, covered = digits.argmax(0), digits.max(0) >= SMALLEST_OVERLAP
    values = np.array([int(digit) for digit in scene.truth.number])
    on_mark = _overlap(scene.mark, canvas) >= SMALLEST_OVERLAP
    truth = scene.truth
    columns = (
        np.where(covered, values[nearest] + 1, 0),
        np.where(covered, nearest + 1, 0),
        on_mark * (PLACES.index(truth.place) + 1),
        on_mark * (list(COLOURS).index(truth.colour) + 1),
        on_mark * (SHAPES.index(truth.shape) + 1),
    )
    labels: NDArray[np.int64] = np.stack(columns, axis=-1).astype(np.int64)
    return labels


def _overlap(box: Box, canvas: Canvas) -> NDArray[np.float64]:
    """[cells]: which share of each cell the box covers, at least 1 for the cell of its centre."""
    (rows, columns), side = canvas.grid, canvas.cell_px
    across = _cover(box.left * canvas.scale[0] + canvas.offset[0], box.width * canvas.scale[0], columns, side)
    down = _cover(box.top * canvas.scale[1] + canvas.offset[1], box.height * canvas.scale[1], rows, side)
    shares = down[:, None] * across[None]
    shares[down.argmax(), across.argmax()] += 1
    return shares.reshape(-1)


def _cover(start: float, length: float, cells: int, side: int) -> NDArray[np.float64]:
    edges = np.arange(cells) * side
    covered = np.minimum(edges + side, start + length) - np.maximum(edges, start)
    shares: NDArray[np.float64] = np.clip(covered, 0, None) / side
    return shares
