"""A picture as the cells (one per image token) and patches that the vision tower sees, for training.

Order everywhere: cell by cell, row by row; inside a cell its 2 x 2 patches, row by row. A test holds this against the
image processor and the model.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from demo.pictures import CELL_PX, COLOURS, PLACES, SHAPES, Box, Scene

PATCH_PX = 8
MERGE = 2
TABLE_SIDE = 16
"""The learned position table has this many rows and columns."""
LABEL_COUNTS = (11, 7, 1 + len(PLACES), 1 + len(COLOURS), 1 + len(SHAPES))
"""Known of a cell, 0 for nothing: its digit, which one of the number that is; the side, colour, shape of the mark."""
SMALLEST_OVERLAP = 0.2


def to_patches(picture: Image.Image, size: tuple[int, int]) -> NDArray[np.uint8]:
    """The picture at `size` (width, height) as [patches, 3 * side * side]."""
    pixels = np.asarray(picture.resize(size, Image.Resampling.BICUBIC))
    rows, columns = size[1] // CELL_PX, size[0] // CELL_PX
    split = pixels.reshape(rows, MERGE, PATCH_PX, columns, MERGE, PATCH_PX, 3)
    return split.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, 3 * PATCH_PX * PATCH_PX)


def patch_coordinates(grid: tuple[int, int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Row and column of every patch of a picture of `grid` (rows, columns) cells."""
    columns = grid[1] * MERGE
    index = np.arange(grid[0] * MERGE * columns).reshape(grid[0], MERGE, grid[1], MERGE)
    ordered = index.transpose(0, 2, 1, 3).reshape(-1)
    return ordered // columns, ordered % columns


@cache
def interpolation(grid: tuple[int, int]) -> NDArray[np.float32]:
    """[patches, table entries]: bilinear weights that stretch the square position table over the picture."""
    rows, columns = patch_coordinates(grid)
    by_row = _stretch(grid[0] * MERGE)[rows]
    by_column = _stretch(grid[1] * MERGE)[columns]
    return (by_row[:, :, None] * by_column[:, None, :]).reshape(len(rows), -1).astype(np.float32)


def cell_labels(scene: Scene, size: tuple[int, int]) -> NDArray[np.int64]:
    """[cells, len(LABEL_COUNTS)] for the picture once it is fitted to `size`."""
    scale = (size[0] / scene.picture.width, size[1] / scene.picture.height)
    digits = np.stack([_overlap(box, scale, size) for box in scene.digits])
    nearest, covered = digits.argmax(0), digits.max(0) >= SMALLEST_OVERLAP
    values = np.array([int(digit) for digit in scene.truth.number])
    on_mark = _overlap(scene.mark, scale, size) >= SMALLEST_OVERLAP
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


def _stretch(target: int) -> NDArray[np.float64]:
    """[target, TABLE_SIDE]: linear weights; the first and last targets sit on the first and last entries."""
    at = np.linspace(0, TABLE_SIDE - 1, target)
    return np.clip(1 - np.abs(at[:, None] - np.arange(TABLE_SIDE)[None]), 0, None)


def _overlap(box: Box, scale: tuple[float, float], size: tuple[int, int]) -> NDArray[np.float64]:
    """[cells]: which share of each cell the box covers, at least 1 for the cell of its centre."""
    across = _cover(box.left * scale[0], box.width * scale[0], size[0] // CELL_PX)
    down = _cover(box.top * scale[1], box.height * scale[1], size[1] // CELL_PX)
    shares = down[:, None] * across[None]
    shares[down.argmax(), across.argmax()] += 1
    return shares.reshape(-1)


def _cover(start: float, length: float, cells: int) -> NDArray[np.float64]:
    edges = np.arange(cells) * CELL_PX
    covered = np.minimum(edges + CELL_PX, start + length) - np.maximum(edges, start)
    shares: NDArray[np.float64] = np.clip(covered, 0, None) / CELL_PX
    return shares
