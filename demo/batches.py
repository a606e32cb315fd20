"""Training batches: pictures of one size with questions, made by worker processes while the GPU computes.

Batch number i depends on (seed, i) alone, so the number of workers does not change what is learned. All shapes follow
from how many tokens and pixels a picture of that size takes, which graphed.py relies on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import Dataset

from demo.architectures.base import Architecture
from demo.digits import Scans
from demo.lessons import make_lesson

Batch = TypeVar("Batch", bound=tuple[Tensor, ...])
"""A named tuple of tensors; each architecture has its own."""


def map_tensors(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """The same kind of batch with every tensor changed."""
    return cast(Batch, cast(Any, type(batch))._make(change(values) for values in batch))


class TrainingBatches(Dataset[tuple[Tensor, ...]]):
    """Item i is batch number `first` + i."""

    def __init__(
        self,
        architecture: Architecture,
        scans: Scans,
        tokenizer_json: str,
        pictures: int,
        questions: int,
        count: int,
        seed: int,
        first: int = 0,
    ) -> None:
        self._architecture, self._scans, self._tokenizer_json = architecture, scans, tokenizer_json
        self._pictures, self._questions, self._count = pictures, questions, count
        self._seed, self._first = seed, first
        self._tokenizer: Tokenizer | None = None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        random = np.random.default_rng([self._seed, self._first + index])
        if self._tokenizer is None:
            self._tokenizer = Tokenizer.from_str(self._tokenizer_json)
        architecture = self._architecture
        size = architecture.batch_size_px(random)
        lessons = [
            make_lesson(random, self._scans, architecture.chat, size, architecture.jitter_px, self._questions)
            for _ in range(self._pictures)
        ]
        return architecture.collate(self._tokenizer, lessons, size)
