"""Admitted requests whose images or videos are still to be encoded: only so many at once.

What is encoded takes memory, on a GPU in the stages' own pool, until its prompt is computed; the encoder must be ahead
of the language stages, but not by much.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from deepstack_serving.engine.encoder import Done, Encoder
from deepstack_serving.engine.sequence import Sequence, Status

PROMPT_STEPS_AHEAD = 2  # one that is computed, and one that is encoded meanwhile


class EncodeQueue:
    """`step_tokens` tokens of prompts fit into one step of the language stages. For the engine thread only."""

    def __init__(self, encoder: Encoder, step_tokens: int) -> None:
        self._encoder, self._most_tokens = encoder, PROMPT_STEPS_AHEAD * step_tokens
        self._waiting: deque[Sequence] = deque()
        self._begun: set[Sequence] = set()

    def add(self, sequence: Sequence) -> None:
        """Behind those that wait already."""
        self._waiting.append(sequence)

    def begin(self, running: Iterable[Sequence], done: Done) -> None:
        """Give the encoder what may be encoded now. `running` are all admitted requests."""
        if self._begun:
            self._begun &= {sequence for sequence in running if _holds_rows(sequence)}
        if begun := self._take():
            self._begun.update(begun)
            self._encoder.submit(begun, done)

    def _take(self) -> list[Sequence]:
        """Those that may be encoded now, out of the queue."""
        taken: list[Sequence] = []
        tokens = sum(sequence.prompt_tokens for sequence in self._begun)
        while self._waiting:
            sequence = self._waiting[0]
            tokens += sequence.prompt_tokens
            if (self._begun or taken) and tokens > self._most_tokens:
                break
            self._waiting.popleft()
            if sequence.status is Status.ENCODING:  # else it ended meanwhile
                taken.append(sequence)
        return taken


def _holds_rows(sequence: Sequence) -> bool:
    return sequence.status is Status.ENCODING or sequence.features is not None
