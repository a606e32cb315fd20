"""Admitted requests whose images or videos are still to be encoded: only so many at once.

What is encoded takes memory, on a GPU in the stages' own pool, until its prompt is computed; the encoder must be ahead
of the language stages, but not by much.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

from deepstack_serving.engine.encoder import Done, Encoder
from deepstack_serving.engine.sequence import Sequence, Status

MOST_STEPS_AHEAD = 3
COMPANY_S = 0.005  # how long an image waits for others: answers that began together end together, and what follows them


class EncodeQueue:
    """`step_tokens` tokens of prompts fit into one step of the language stages. For the engine thread only."""

    def __init__(self, encoder: Encoder, step_tokens: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._encoder, self._step_tokens, self._clock = encoder, step_tokens, clock
        self._waiting: deque[Sequence] = deque()
        self._came_s = 0.0  # when the last one did that found none waiting
        self._begun: set[Sequence] = set()

    def add(self, sequence: Sequence) -> None:
        """Behind those that wait already."""
        if not self._waiting:
            self._came_s = self._clock()
        self._waiting.append(sequence)

    def begin(self, running: Iterable[Sequence], done: Done, groups: int = 1, *, patient: bool = False) -> None:
        """Give the encoder what may be encoded now. `running` are all admitted requests, in so many groups: each may
        compute a step of prompts, while those of one more are encoded.

        `patient`: this is called again in a moment, so that an image may wait for others.
        """
        if self._begun:
            self._begun &= {sequence for sequence in running if _holds_rows(sequence)}
        self._waiting = deque(item for item in self._waiting if item.status is Status.ENCODING)  # others ended
        if not self._waiting:
            return
        if not (patient and self._awaits_company(running)) and (begun := self._take(groups)):
            self._begun.update(begun)
            self._encoder.submit(begun, done, self._waiting)

    def _awaits_company(self, running: Iterable[Sequence]) -> bool:
        """Whether what waits came just now, others would fit beside it into a call and then into a step, and the
        language stages have answers to go on with.
        """
        if self._clock() - self._came_s >= COMPANY_S or any(sequence.files.videos for sequence in self._waiting):
            return False
        tokens = self._waiting[0].prompt_tokens + sum(sequence.prompt_tokens for sequence in self._waiting)
        fits = tokens <= min(self._step_tokens, self._encoder.batch_tokens)
        return fits and any(sequence.status is Status.RUNNING and not sequence.in_prefill for sequence in running)

    def _take(self, groups: int) -> list[Sequence]:
        """Those that may be encoded now, out of the queue: a step's worth where that many wait."""
        most = min(groups + 1, MOST_STEPS_AHEAD) * self._step_tokens
        ahead = sum(sequence.prompt_tokens for sequence in self._begun)
        taken: list[Sequence] = []
        tokens = 0
        while self._waiting:
            tokens += self._waiting[0].prompt_tokens
            if (self._begun or taken) and ahead + tokens > most:
                if self._begun and tokens <= self._step_tokens:  # in a moment this one fits, too
                    self._waiting.extendleft(reversed(taken))
                    return []
                break
            taken.append(self._waiting.popleft())
        return taken


def _holds_rows(sequence: Sequence) -> bool:
    return sequence.status is Status.ENCODING or sequence.features is not None
