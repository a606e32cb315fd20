"""Decides who runs: first come, first served admission by free blocks, then one step's work under a token budget.

Each step decodes every running sequence by one token and spends the rest of the budget on prompts, oldest first; a
prompt that does not fit is cut and goes on in the next step.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from deepstack_serving.engine.block_allocator import BlockAllocator
from deepstack_serving.engine.sequence import Sequence, Status
from deepstack_serving.errors import InvalidRequestError, UnavailableError


@dataclass(frozen=True)
class Work:
    """The tokens [start, end) of a sequence that one step computes."""

    sequence: Sequence
    start: int
    end: int

    @property
    def samples(self) -> bool:
        """Whether the last of these rows gives a new token."""
        return self.end >= self.sequence.prompt.length


class Scheduler:
    """Owner of the queue, the running set and the block numbers."""

    def __init__(self, allocator: BlockAllocator, max_running: int, max_waiting: int, token_budget: int) -> None:
        self.allocator = allocator
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._max_running, self._max_waiting, self._token_budget = max_running, max_waiting, token_budget

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.running

    @property
    def has_work(self) -> bool:
        """Whether `admit` or `plan` would give something."""
        return self._fits_next() or any(sequence.status is Status.RUNNING for sequence in self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a request. Raises InvalidRequestError if it could never run, UnavailableError if the queue is full."""
        needed = self.allocator.needed(sequence.total_tokens)
        if needed > self.allocator.total:
            capacity = self.allocator.total * self.allocator.block_size
            raise InvalidRequestError(
                f"prompt and max_tokens come to {sequence.total_tokens} tokens, the whole KV pool holds {capacity}: "
                f"lower max_tokens, shorten the prompt, or send smaller images"
            )
        runs_now = not self.waiting and self._has_room() and needed <= self.allocator.free
        if len(self.waiting) >= self._max_waiting and not runs_now:
            raise UnavailableError(f"{len(self.waiting)} requests are waiting already; send this one again later")
        self.waiting.append(sequence)

    def admit(self) -> list[Sequence]:
        """Move requests from the head of the queue into the running set while blocks last; returns them."""
        admitted = []
        while self._fits_next():
            sequence = self.waiting.popleft()
            sequence.blocks = self.allocator.allocate(self.allocator.needed(sequence.total_tokens))
            sequence.block_table = np.asarray(sequence.blocks, dtype=np.int32)
            sequence.status = Status.ENCODING if sequence.files else Status.RUNNING
            self.running.append(sequence)
            admitted.append(sequence)
        return admitted

    def plan(self) -> list[Work]:
        """The work of one step; empty when nothing can run now."""
        ready = [sequence for sequence in self.running if sequence.status is Status.RUNNING]
        work = [Work(item, item.computed, item.computed + 1) for item in ready if not item.in_prefill]
        budget = self._token_budget - len(work)
        for sequence in ready:
            if sequence.in_prefill and budget > 0:
                end = min(sequence.prompt.length, sequence.computed + budget)
                work.append(Work(sequence, sequence.computed, end))
                budget -= end - sequence.computed
        return work

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and free its blocks. Doing it twice is the same as once.

        One that was never added is marked only.
        """
        if sequence.status is Status.FINISHED:
            return
        for queue in (self.waiting, self.running):
            if sequence in queue:
                queue.remove(sequence)
        sequence.status = Status.FINISHED
        sequence.features = None
        self.allocator.release(sequence.blocks)
        sequence.blocks = []

    def _fits_next(self) -> bool:
        return (
            bool(self.waiting)
            and self._has_room()
            and self.allocator.needed(self.waiting[0].total_tokens) <= self.allocator.free
        )

    def _has_room(self) -> bool:
        return len(self.running) < self._max_running
