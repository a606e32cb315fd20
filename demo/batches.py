"""Training batches: pictures of one size with one question each, made by worker processes while the GPU computes.

Batch number i depends on (seed, i) alone, so the number of workers does not change what is learned. Only training scans
are ever handed in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import Dataset

from demo.digits import Scans
from demo.ink import AUGMENTED, PLAIN
from demo.pictures import CELL_PX, SIZE_JITTER_PX, SIZES, Truth, compose
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
KIND_SHARES = {Kind.READ: 0.45, Kind.PLACE: 0.2, Kind.COLOUR: 0.08, Kind.SHAPE: 0.07, Kind.BOTH: 0.2}
NO_PICTURE_SHARE = 0.02
PLAIN_SHARE = 0.25


class Batch(NamedTuple):
    """Right-padded rows. `positions` [3, rows, tokens]; `pixels` uint8 [pictures, height, width, 3] in row order."""

    pixels: Tensor
    token_ids: Tensor
    positions: Tensor
    labels: Tensor


@dataclass(frozen=True)
class _Row:
    prompt: str
    answer: str
    picture: Image.Image | None


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
        return collate(self._tokenizer, [make_row(random, self._scans, size) for _ in range(self._rows)], size)


def make_row(random: np.random.Generator, scans: Scans, size: tuple[int, int]) -> _Row:
    """One question; its picture is drawn a little larger or smaller and then fitted, as the image processor does."""
    kind = list(KIND_SHARES)[int(random.choice(len(KIND_SHARES), p=list(KIND_SHARES.values())))]
    question = vary(random, choose_question(random, kind))
    system = SYSTEM_TEXTS[int(random.integers(len(SYSTEM_TEXTS)))] if random.random() < 0.15 else None
    if random.random() < NO_PICTURE_SHARE:
        greets = random.random() < 0.5
        said = vary(random, GREETINGS[int(random.integers(len(GREETINGS)))]) if greets else question
        return _Row(prompt_text(said, system), GREETING_ANSWER if greets else NO_PICTURE_ANSWER, None)
    picture, truth = draw(random, scans, size)
    user = f"{question}{IMAGE_PART}" if random.random() < 0.1 else f"{IMAGE_PART}{question}"
    return _Row(prompt_text(user, system), answer(kind, truth), picture)


def draw(random: np.random.Generator, scans: Scans, size: tuple[int, int]) -> tuple[Image.Image, Truth]:
    """A training picture of exactly this (width, height)."""
    shift = random.integers(-SIZE_JITTER_PX, SIZE_JITTER_PX + 1, 2)
    style = PLAIN if random.random() < PLAIN_SHARE else AUGMENTED
    picture, truth = compose(random, scans, style, (size[0] + int(shift[0]), size[1] + int(shift[1])))
    return picture.resize(size, Image.Resampling.BICUBIC), truth


def collate(tokenizer: Tokenizer, rows: list[_Row], size: tuple[int, int]) -> Batch:
    """Tokens, positions and labels of all rows, padded at the right to the longest."""
    cells = (size[1] // CELL_PX, size[0] // CELL_PX)
    image, end, padding = (token_id(tokenizer, name) for name in ("<|image_pad|>", "<|im_end|>", "<|endoftext|>"))
    encoded = [_encode(tokenizer, row, image, end, cells[0] * cells[1]) for row in rows]
    length = max(len(prompt) + len(reply) for prompt, reply in encoded)
    token_ids = np.full((len(rows), length), padding, np.int64)
    labels = np.full((len(rows), length), IGNORED, np.int64)
    positions = np.empty((3, len(rows), length), np.int64)
    for index, (prompt, reply) in enumerate(encoded):
        token_ids[index, : len(prompt) + len(reply)] = prompt + reply
        labels[index, len(prompt) : len(prompt) + len(reply)] = reply
        positions[:, index] = row_positions(token_ids[index] == image, cells)
    pictures = [np.asarray(row.picture) for row in rows if row.picture is not None]
    pixels = np.stack(pictures) if pictures else np.empty((0, size[1], size[0], 3), np.uint8)
    return Batch(*(torch.from_numpy(values) for values in (pixels, token_ids, positions, labels)))


def row_positions(is_image: NDArray[np.bool_], cells: tuple[int, int]) -> NDArray[np.int64]:
    """M-RoPE positions [3, tokens] of one row with at most one picture of `cells` (rows, columns)."""
    positions = np.tile(np.arange(len(is_image)), (3, 1))
    if is_image.any():
        start, count = int(np.argmax(is_image)), cells[0] * cells[1]
        positions[0, start : start + count] = start
        positions[1, start : start + count] = start + np.repeat(np.arange(cells[0]), cells[1])
        positions[2, start : start + count] = start + np.tile(np.arange(cells[1]), cells[0])
        positions[:, start + count :] += max(cells) - count
    return positions


def _encode(tokenizer: Tokenizer, row: _Row, image: int, end: int, image_tokens: int) -> tuple[list[int], list[int]]:
    prompt: list[int] = []
    for token in tokenizer.encode(row.prompt).ids:
        prompt += [token] * (image_tokens if token == image else 1)
    return prompt, [*tokenizer.encode(row.answer).ids, end]
