"""A picture as Granite's image processor cuts it: a thumbnail, tiles of one size, and the rows of its features.

Tests hold this against the processor and the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from transformers.image_processing_utils import select_best_resolution

from demo.labels import LABEL_COUNTS, Canvas, cell_labels
from demo.pictures import Scene

TILE_PX = 128
PATCH_PX = 8
PATCHES = TILE_PX // PATCH_PX
"""Vision patches along a tile's side; a feature covers 2 x 2 of them."""
CELLS = PATCHES // 2
CORNERS = ((0, 0), (0, 1), (1, 0), (1, 1))
"""Row and column, in a feature's 2 x 2 patches, of the patch that each spatial group samples."""
PINPOINTS = ((TILE_PX, TILE_PX), (TILE_PX, 2 * TILE_PX))
"""(height, width) that a picture can be fitted to."""
NEWLINE = -1


@dataclass(frozen=True)
class Layout:
    """How pictures of one size are cut. `tiles` is (down, across), `fitted` (width, height) and `offset` (left, top)
    say where in them the picture lies, in pixels; `order` [image tokens] names the feature at each image token, counted
    through the thumbnail's and the tiles' cells, or NEWLINE."""

    tiles: tuple[int, int]
    fitted: tuple[int, int]
    offset: tuple[int, int]
    order: NDArray[np.int64]


@cache
def layout_of(width: int, height: int) -> Layout:
    """For pictures of this size in pixels."""
    best = select_best_resolution((height, width), [list(size) for size in PINPOINTS])
    across, down = best[1] / width, best[0] / height
    if across < down:
        fitted = best[1], min(int(np.ceil(height * across)), best[0])
    else:
        fitted = min(int(np.ceil(width * down)), best[1]), best[0]
    offset = (best[1] - fitted[0]) // 2, (best[0] - fitted[1]) // 2
    tiles = best[0] // TILE_PX, best[1] // TILE_PX
    return Layout(tiles, fitted, offset, _order(tiles, width, height))


def _order(tiles: tuple[int, int], width: int, height: int) -> NDArray[np.int64]:
    """The thumbnail's cells, then the tiles' without rows and columns of padding, a newline after each row."""
    first = CELLS**2
    count = tiles[0] * tiles[1] * first
    grid = np.arange(first, first + count).reshape(*tiles, CELLS, CELLS).transpose(0, 2, 1, 3)
    grid = grid.reshape(tiles[0] * CELLS, tiles[1] * CELLS)
    rows, columns = grid.shape
    if width / height > columns / rows:
        padding = (rows - int(round(height * (columns / width), 7))) // 2
        grid = grid[padding : rows - padding]
    else:
        padding = (columns - int(round(width * (rows / height), 7))) // 2
        grid = grid[:, padding : columns - padding]
    ended = np.concatenate([grid, np.full((len(grid), 1), NEWLINE)], axis=1)
    return np.concatenate([np.arange(first), ended.reshape(-1)])


def cut(picture: Image.Image, layout: Layout) -> NDArray[np.uint8]:
    """[1 + tiles, 3, TILE_PX, TILE_PX]: the thumbnail, stretched to a square, and the tiles with black padding."""
    down, across = layout.tiles
    canvas = np.zeros((down * TILE_PX, across * TILE_PX, 3), np.uint8)
    left, top = layout.offset
    fitted = np.asarray(picture.resize(layout.fitted, Image.Resampling.BICUBIC))
    canvas[top : top + fitted.shape[0], left : left + fitted.shape[1]] = fitted
    tiles = canvas.reshape(down, TILE_PX, across, TILE_PX, 3).transpose(0, 2, 1, 3, 4).reshape(-1, TILE_PX, TILE_PX, 3)
    thumbnail = np.asarray(picture.resize((TILE_PX, TILE_PX), Image.Resampling.BICUBIC))
    return np.ascontiguousarray(np.concatenate([thumbnail[None], tiles]).transpose(0, 3, 1, 2))


def corner_labels(scene: Scene, layout: Layout) -> NDArray[np.uint8]:
    """[1 + tiles, cells, corners, len(LABEL_COUNTS)]: what the patch shows that a spatial group samples in a cell."""
    picture, (down, across) = scene.picture, layout.tiles
    thumbnail = Canvas((TILE_PX / picture.width, TILE_PX / picture.height), (PATCHES, PATCHES), PATCH_PX)
    scale = layout.fitted[0] / picture.width, layout.fitted[1] / picture.height
    fitted = Canvas(scale, (down * PATCHES, across * PATCHES), PATCH_PX, layout.offset)
    labels = [_by_tile(cell_labels(scene, thumbnail), (1, 1)), _by_tile(cell_labels(scene, fitted), layout.tiles)]
    return np.ascontiguousarray(np.concatenate(labels), dtype=np.uint8)


def _by_tile(labels: NDArray[np.int64], tiles: tuple[int, int]) -> NDArray[np.int64]:
    """[patches of all tiles, known] to [tiles, cells, corners, known]."""
    split = labels.reshape(tiles[0], CELLS, 2, tiles[1], CELLS, 2, len(LABEL_COUNTS))
    return split.transpose(0, 3, 1, 4, 2, 5, 6).reshape(-1, CELLS**2, len(CORNERS), len(LABEL_COUNTS))
