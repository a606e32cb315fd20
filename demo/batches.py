"""Training batches: pictures of one size with one question each, made by worker processes while the GPU computes.

Batch number i depends on (seed, i) alone, so the number of workers does not change what is learned. Only training scans
are ever handed in. All shapes follow from the number of cells of the picture, which graphed.py relies on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import Dataset

from demo.cells import cell_labels, interpolation, patch_coordinates, to_patches
from demo.digits import Scans
from demo.ink import AUGMENTED, PLAIN
from demo.pictures import CELL_PX, SIZE_JITTER_PX, SIZES, Scene, Truth, compose_scene
from demo.questions import (
    GREETING_ANSWER,
    GREETINGS,
    NO_PICTURE_ANSWER,
    SYSTEM_TEXTS,
    Kind,
    answer,
    choose_question,
    vary,
)
from demo.tokenizer import IMAGE_PART, prompt_text, token_id

IGNORED = -100
TEXT_TOKENS = 80
"""Room for everything but the picture in one row."""
KIND_SHARES = {Kind.READ: 0.48, Kind.PLACE: 0.13, Kind.COLOUR: 0.06, Kind.SHAPE: 0.11, Kind.BOTH: 0.22}
QUESTIONS_PER_PICTURE = 2
NO_PICTURE_SHARE = 0.02
PLAIN_SHARE = 0.25
MAIN_DROP = 0.6
"""Share of the pictures whose main embeddings are zeroed; see learner.py."""


class Batch(NamedTuple):
    """Right-padded rows, one question each, and their pictures (QUESTIONS_PER_PICTURE rows share one).

    patches        uint8 [pictures, patches, 3 * side * side], cell by cell
    stretch        [patches, table entries]: how the position table is stretched over the picture
    coordinates    [2, patches]: row and column of each patch
    cell_labels    [pictures, cells, 5]: what each cell shows, see cells.py
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


@dataclass(frozen=True)
class Row:
    """One question and its answer."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class Lesson:
    """A picture and the questions about it; a prompt may leave the picture out."""

    scene: Scene
    rows: tuple[Row, ...]
    main_kept: bool


class TrainingBatches(Dataset[Batch]):
    """Item i is batch i."""

    def __init__(self, scans: Scans, tokenizer_json: str, rows: int, count: int, seed: int) -> None:
        self._scans, self._tokenizer_json = scans, tokenizer_json
        self._rows, self._count, self._seed = rows, count, seed
        self._tokenizer: Tokenizer | None = None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Batch:
        random = np.random.default_rng([self._seed, index])
        if self._tokenizer is None:
            self._tokenizer = Tokenizer.from_str(self._tokenizer_json)
        size = SIZES[int(random.integers(len(SIZES)))]
        pictures = self._rows // QUESTIONS_PER_PICTURE
        return collate(self._tokenizer, [make_lesson(random, self._scans, size) for _ in range(pictures)], size)


def make_lesson(random: np.random.Generator, scans: Scans, size: tuple[int, int]) -> Lesson:
    """A picture of about this (width, height)."""
    shift = random.integers(-SIZE_JITTER_PX, SIZE_JITTER_PX + 1, 2)
    style = PLAIN if random.random() < PLAIN_SHARE else AUGMENTED
    scene = compose_scene(random, scans, style, (size[0] + int(shift[0]), size[1] + int(shift[1])))
    rows = tuple(make_row(random, scene.truth) for _ in range(QUESTIONS_PER_PICTURE))
    return Lesson(scene, rows, bool(random.random() >= MAIN_DROP))


def make_row(random: np.random.Generator, truth: Truth) -> Row:
    """One question; seldom without the picture, and then the answer is that there is none."""
    kind = list(KIND_SHARES)[int(random.choice(len(KIND_SHARES), p=list(KIND_SHARES.values())))]
    question = vary(random, choose_question(random, kind))
    system = SYSTEM_TEXTS[int(random.integers(len(SYSTEM_TEXTS)))] if random.random() < 0.15 else None
    if random.random() < NO_PICTURE_SHARE:
        greets = random.random() < 0.5
        said = vary(random, GREETINGS[int(random.integers(len(GREETINGS)))]) if greets else question
        return Row(prompt_text(said, system), GREETING_ANSWER if greets else NO_PICTURE_ANSWER)
    user = f"{question}{IMAGE_PART}" if random.random() < 0.1 else f"{IMAGE_PART}{question}"
    return Row(prompt_text(user, system), answer(kind, truth))


def collate(tokenizer: Tokenizer, lessons: list[Lesson], size: tuple[int, int]) -> Batch:
    """Fit every picture to `size`, as the image processor does, and pad every row to the same length."""
    grid = (size[1] // CELL_PX, size[0] // CELL_PX)
    cells = grid[0] * grid[1]
    image, end, padding = (token_id(tokenizer, name) for name in ("<|image_pad|>", "<|im_end|>", "<|endoftext|>"))
    rows = [(number, row) for number, lesson in enumerate(lessons) for row in lesson.rows]
    length = cells + TEXT_TOKENS
    token_ids = np.full((len(rows), length), padding, np.int64)
    labels = np.full((len(rows), length), IGNORED, np.int64)
    positions = np.empty((3, len(rows), length), np.int64)
    picture_index = np.zeros((len(rows), length), np.int64)
    for index, (picture, row) in enumerate(rows):
        prompt, reply = _encode(tokenizer, row, image, cells), [*tokenizer.encode(row.answer).ids, end]
        token_ids[index, : len(prompt) + len(reply)] = prompt + reply
        labels[index, len(prompt) : len(prompt) + len(reply)] = reply
        is_image = token_ids[index] == image
        positions[:, index] = row_positions(is_image, grid)
        picture_index[index, is_image] = picture * cells + np.arange(int(is_image.sum()))
    arrays = (
        np.stack([to_patches(lesson.scene.picture, size) for lesson in lessons]),
        interpolation(grid),
        np.stack(patch_coordinates(grid)).astype(np.float32),
        np.stack([cell_labels(lesson.scene, size) for lesson in lessons]),
        np.array([lesson.main_kept for lesson in lessons], np.float32)[:, None, None],
        token_ids,
        picture_index.reshape(-1),
        (token_ids == image).astype(np.float32)[..., None],
        positions,
        labels,
    )
    return Batch(*(torch.from_numpy(values) for values in arrays))


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


def _encode(tokenizer: Tokenizer, row: Row, image: int, cells: int) -> list[int]:
    prompt: list[int] = []
    for token in tokenizer.encode(row.prompt).ids:
        prompt += [token] * (cells if token == image else 1)
    return prompt
