"""Qwen3-VL while training: batches, and the forward pass over a whole batch of pictures of one size.

Order everywhere: cell by cell (one per image token), row by row; inside a cell its 2 x 2 patches, row by row. Tests
hold this against the image processor and the model.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional

from demo.labels import Canvas, cell_labels
from demo.learner import Probes, answer_loss, embed_tokens, spread
from demo.lessons import Lesson, token_rows
from demo.pictures import CELL_PX
from demo.tokenizer import ChatFormat

PATCH_PX = 8
MERGE = 2
TABLE_SIDE = 16
"""The learned position table has this many rows and columns."""


class Batch(NamedTuple):
    """Right-padded rows, one question each, and their pictures (a fixed number of rows share one).

    patches        uint8 [pictures, patches, 3 * side * side], cell by cell
    stretch        [patches, table entries]: how the position table is stretched over the picture
    coordinates    [2, patches]: row and column of each patch
    cell_labels    [pictures, cells, 5]: what each cell shows, see labels.py
    main_kept      [pictures, 1, 1]: 0 where the main embeddings are zeroed
    token_ids      [rows, tokens]
    picture_index  [rows * tokens]: the cell, counted through the whole batch, that stands at this token
    is_picture     [rows, tokens, 1]: 1 where a cell stands
    positions      [3, rows, tokens]
    labels         [rows, tokens], IGNORED outside of answers
    """

    patches: Tensor
    stretch: Tensor
    coordinates: Tensor
    cell_labels: Tensor
    main_kept: Tensor
    token_ids: Tensor
    picture_index: Tensor
    is_picture: Tensor
    positions: Tensor
    labels: Tensor


def collate(tokenizer: Tokenizer, chat: ChatFormat, lessons: list[Lesson], size: tuple[int, int]) -> Batch:
    """Fit every picture to `size`, as the image processor does, and pad every row to the same length."""
    grid = (size[1] // CELL_PX, size[0] // CELL_PX)
    cells = grid[0] * grid[1]
    rows = token_rows(tokenizer, chat, lessons, cells)
    picture_index = np.zeros_like(rows.token_ids)
    for index, (is_image, picture) in enumerate(zip(rows.is_image, rows.pictures, strict=True)):
        picture_index[index, is_image] = picture * cells + np.arange(int(is_image.sum()))
    arrays = (
        np.stack([to_patches(lesson.scene.picture, size) for lesson in lessons]),
        interpolation(grid),
        np.stack(patch_coordinates(grid)).astype(np.float32),
        np.stack([cell_labels(lesson.scene, _canvas(lesson, size, grid)) for lesson in lessons]),
        np.array([lesson.other_paths_kept for lesson in lessons], np.float32)[:, None, None],
        rows.token_ids,
        picture_index.reshape(-1),
        rows.is_image.astype(np.float32)[..., None],
        np.stack([row_positions(is_image, grid) for is_image in rows.is_image], axis=1),
        rows.labels,
    )
    return Batch(*(torch.from_numpy(values) for values in arrays))


def _canvas(lesson: Lesson, size: tuple[int, int], grid: tuple[int, int]) -> Canvas:
    picture = lesson.scene.picture
    return Canvas((size[0] / picture.width, size[1] / picture.height), grid, CELL_PX)


def row_positions(is_image: NDArray[np.bool_], grid: tuple[int, int]) -> NDArray[np.int64]:
    """M-RoPE positions [3, tokens] of one row with at most one picture of `grid` (rows, columns) cells."""
    positions = np.tile(np.arange(len(is_image)), (3, 1))
    if is_image.any():
        start, count = int(np.argmax(is_image)), grid[0] * grid[1]
        positions[0, start : start + count] = start
        positions[1, start : start + count] = start + np.repeat(np.arange(grid[0]), grid[1])
        positions[2, start : start + count] = start + np.tile(np.arange(grid[1]), grid[0])
        positions[:, start + count :] += max(grid) - count
    return positions


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


def _stretch(target: int) -> NDArray[np.float64]:
    """[target, TABLE_SIDE]: linear weights; the first and last targets sit on the first and last entries."""
    at = np.linspace(0, TABLE_SIDE - 1, target)
    return np.clip(1 - np.abs(at[:, None] - np.arange(TABLE_SIDE)[None]), 0, None)


def training_loss(model: Any, probes: Probes, batch: Batch) -> Tensor:
    """[answers' loss, probes' loss]."""
    main, deepstack = encode_pictures(model.model.visual, batch)
    hidden = run_language(model, batch, main * batch.main_kept, deepstack)
    loss = answer_loss(model.lm_head(hidden[:, :-1]), batch.labels)
    return torch.stack([loss, probes(deepstack, [batch.cell_labels] * len(deepstack))])


def run_language(model: Any, batch: Batch, main: Tensor, deepstack: list[Tensor]) -> Tensor:
    """Hidden states [rows, tokens, width] after the last norm."""
    inner: Any = model.model.language_model
    embeddings = embed_tokens(inner.embed_tokens.weight, batch.token_ids)
    hidden = embeddings * (1 - batch.is_picture) + _at_cells(main, batch)
    turns = inner.rotary_emb(hidden, batch.positions)
    for number, layer in enumerate(inner.layers):
        hidden = layer(hidden, position_embeddings=turns, attention_mask=None)
        if number < len(deepstack):
            hidden = hidden + _at_cells(deepstack[number], batch)
    normed: Tensor = inner.norm(hidden)
    return normed


def encode_pictures(visual: nn.Module, batch: Batch) -> tuple[Tensor, list[Tensor]]:
    """Main embeddings [pictures, cells, width] and one such tensor per deepstack level."""
    modules: Any = visual
    pictures, count, _ = batch.patches.shape
    width = modules.config.out_hidden_size
    hidden = modules.patch_embed(as_frames(batch.patches)).view(pictures, count, -1)
    hidden = hidden + batch.stretch @ modules.pos_embed.weight
    turns = _rotations(modules.rotary_pos_emb.inv_freq, batch.coordinates)
    deepstack: list[Tensor] = []
    for number, block in enumerate(modules.blocks):
        hidden = hidden + _attend(block.attn, block.norm1(hidden), turns)
        hidden = hidden + block.mlp(block.norm2(hidden))
        if number in modules.deepstack_visual_indexes:
            merger = modules.deepstack_merger_list[len(deepstack)]
            deepstack.append(merger(hidden).view(pictures, -1, width))
    return modules.merger(hidden).view(pictures, -1, width), deepstack


def _at_cells(features: Tensor, batch: Batch) -> Tensor:
    return spread(features.flatten(0, 1), batch.picture_index, batch.is_picture)


def as_frames(patches: Tensor) -> Tensor:
    """uint8 to -1..1, each patch twice in time, as a still picture goes in: [all patches, 3 * 2 * side * side]."""
    values = patches.float().div(127.5).sub(1).view(-1, 3, 1, patches.shape[-1] // 3)
    return values.expand(-1, -1, 2, -1).reshape(len(values), -1)


def _rotations(inverse_frequency: Tensor, coordinates: Tensor) -> tuple[Tensor, Tensor]:
    angles = torch.cat([places[:, None] * inverse_frequency for places in coordinates.unbind(0)], dim=-1)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def _attend(attention: Any, hidden: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    pictures, patches, width = hidden.shape
    packed = attention.qkv(hidden).view(pictures, patches, 3, attention.num_heads, -1).permute(2, 0, 3, 1, 4)
    query, key, value = packed.unbind(0)
    mixed = functional.scaled_dot_product_attention(_turn(query, turns), _turn(key, turns), value)
    projected: Tensor = attention.proj(mixed.transpose(1, 2).reshape(pictures, patches, width))
    return projected


def _turn(vectors: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    first, second = vectors.chunk(2, dim=-1)
    cosine, sine = turns
    return (vectors * cosine + torch.cat([-second, first], dim=-1) * sine).to(vectors.dtype)
