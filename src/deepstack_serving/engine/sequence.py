"""The state of one accepted request. Owned by the engine thread from `submit` to its end; nobody else writes to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property

import numpy as np
import numpy.typing as npt

from deepstack_serving.engine.ports import Handle, ReplyPort
from deepstack_serving.engine.request import GenerationRequest
from deepstack_serving.families.base import Positions
from deepstack_serving.media import MediaFiles
from deepstack_serving.prompt.placeholders import Prompt


class Status(Enum):
    """WAITING for blocks, ENCODING its images and videos, RUNNING (prefill, then decode), FINISHED."""

    WAITING = auto()
    ENCODING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(frozen=True, eq=False)
class EncodedBatch:
    """What one call of the encoder gave, for one request or for several: named tensors of the same number of rows.

    Those that are not `joinable` stay on a GPU and go to the stages without those of other calls beside them.
    """

    tensors: Mapping[str, Handle]
    rows: int
    joinable: bool = True


@dataclass(frozen=True)
class Features:
    """Encoded images and videos of a request: the rows of a batch from `first_row` on, and their rotary positions."""

    batch: EncodedBatch
    first_row: int
    positions: Positions


@dataclass(eq=False)
class Sequence:
    """One request on its way. `computed` tokens have their keys and values in every stage's pool."""

    request: GenerationRequest
    prompt: Prompt
    files: MediaFiles
    reply: ReplyPort
    deadline_s: float
    status: Status = Status.WAITING
    blocks: list[int] = field(default_factory=list)
    block_table: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    computed: int = 0
    output_ids: list[int] = field(default_factory=list)
    features: Features | None = None
    positions: Positions | None = None
    group: int = 0
    is_in_step: bool = False  # a step runs that writes to its blocks

    @cached_property
    def max_tokens(self) -> int:
        return self.request.sampling.max_tokens or 1

    @cached_property
    def prompt_tokens(self) -> int:
        return self.prompt.length

    @property
    def total_tokens(self) -> int:
        """The most tokens that this request can come to."""
        return self.prompt_tokens + self.max_tokens

    @property
    def in_prefill(self) -> bool:
        return self.computed < self.prompt_tokens
