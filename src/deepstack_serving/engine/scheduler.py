"""Decides who runs: first come, first served admission by free blocks, then one step's work under a token budget.

Each step decodes every running sequence by one token and spends the rest of the budget on prompts, oldest first; a
prompt that does not fit is cut and goes on in the next step. Features on a GPU are not joined, which would take memory
there: a step has those of one call of the encoder.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from deepstack_serving.engine.block_allocator import BlockAllocator
from deepstack_serving.engine.sequence import EncodedBatch, Sequence, Status
from deepstack_serving.errors import InvalidRequestError, UnavailableError


class Work(NamedTuple):
    """The tokens [start, end) of a sequence that one step computes: one of its answer (`decodes`), or of its prompt."""

    sequence: Sequence
    start: int
    end: int
    decodes: bool

    @property
    def samples(self) -> bool:
        """Whether the last of these rows gives a new token."""
        return self.decodes or self.end >= self.sequence.prompt.length

    @property
    def image_rows(self) -> int:
        """How many of these rows take features."""
        if self.decodes:
            return 0
        start, end = np.searchsorted(self.sequence.prompt.image_rows, (self.start, self.end))
        return int(end - start)


class Scheduler:
    """Owner of the queue, the running set and the block numbers."""

    def __init__(self, allocator: BlockAllocator, max_running: int, max_waiting: int, token_budget: int) -> None:
        self.allocator = allocator
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.groups = 1
        self._departed: set[int] = set()
        self._max_running, self._max_waiting, self._token_budget = max_running, max_waiting, token_budget

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.running

    @property
    def has_work(self) -> bool:
        """Whether `admit` or `plan` would give something."""
        return self._fits_next() or any(map(self._can_step, self.running))

    @property
    def has_newcomers(self) -> bool:
        """Whether a sequence can run that is in no step."""
        return any(sequence.status is Status.RUNNING and not sequence.is_in_step for sequence in self.running)

    @property
    def has_prompts(self) -> bool:
        """Whether a prompt can be computed now, or is."""
        return any(sequence.status is Status.RUNNING and sequence.in_prefill for sequence in self.running)

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
            sequence.group = self._smallest_group()
            self.running.append(sequence)
            admitted.append(sequence)
        return admitted

    def plan(self, group: int = 0) -> list[Work]:
        """The work of one step of a group, decoding sequences first; empty when none of it can run now."""
        is_running = Status.RUNNING
        ready = [
            item for item in self.running if item.status is is_running and item.group == group and not item.is_in_step
        ]
        work = [
            Work(item, item.computed, item.computed + 1, True) for item in ready if item.computed >= item.prompt_tokens
        ]
        if len(work) < len(ready):
            self._add_prompts(work, [sequence for sequence in ready if sequence.in_prefill])
        return work

    def _add_prompts(self, work: list[Work], prompts: Iterable[Sequence]) -> None:
        budget = self._token_budget - len(work)
        taken: list[EncodedBatch] = []
        for sequence in prompts:
            if budget <= 0:
                return
            end = min(sequence.prompt.length, sequence.computed + budget)
            item = Work(sequence, sequence.computed, end, False)
            if sequence.features is not None and item.image_rows:
                batch = sequence.features.batch
                if taken and batch is not taken[0] and not (batch.joinable and taken[0].joinable):
                    continue  # in the next step
                taken.append(batch)
            work.append(item)
            budget -= item.end - item.start

    def set_groups(self, count: int) -> None:
        """Divide the running sequences into so many groups; steps of different groups may overlap."""
        self.groups = count
        for place, sequence in enumerate(self.running):
            sequence.group = place % count

    def free_groups(self) -> list[int]:
        """Those none of whose steps is running."""
        return [group for group in range(self.groups) if group not in self._departed]

    def balance(self, group: int) -> None:
        """Move sequences of a free group to smaller ones."""
        sizes = self._group_sizes()
        for sequence in [item for item in self.running if item.group == group]:
            smallest = self._smallest_group(sizes)
            if sizes[group] - sizes[smallest] < 2:
                return
            sequence.group = smallest
            sizes[group] -= 1
            sizes[smallest] += 1

    def depart(self, group: int, work: Iterable[Work]) -> None:
        """A step begins, and the engine goes on: until `arrive`, its sequences' blocks are written to."""
        self._departed.add(group)
        for item in work:
            item.sequence.is_in_step = True

    def arrive(self, group: int, work: Iterable[Work]) -> None:
        """The step is over; those that ended meanwhile give their blocks back now."""
        self._departed.remove(group)
        for item in work:
            item.sequence.is_in_step = False
            if item.sequence.status is Status.FINISHED:
                self._release(item.sequence)

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and free its blocks, after its step. Doing it twice is as once.

        One that was never added is marked only.
        """
        if sequence.status is Status.FINISHED:
            return
        for queue in (self.waiting, self.running):
            if sequence in queue:
                queue.remove(sequence)
        sequence.status = Status.FINISHED
        sequence.features = None
        if not sequence.is_in_step:
            self._release(sequence)

    def _can_step(self, sequence: Sequence) -> bool:
        return sequence.status is Status.RUNNING and not sequence.is_in_step and sequence.group not in self._departed

    def _release(self, sequence: Sequence) -> None:
        self.allocator.release(sequence.blocks)
        sequence.blocks = []

    def _group_sizes(self) -> Counter[int]:
        return Counter(sequence.group for sequence in self.running)

    def _smallest_group(self, sizes: Counter[int] | None = None) -> int:
        if self.groups == 1:
            return 0
        counted = self._group_sizes() if sizes is None else sizes
        return min(range(self.groups), key=lambda group: counted[group])

    def _fits_next(self) -> bool:
        return (
            bool(self.waiting)
            and self._has_room()
            and self.allocator.needed(self.waiting[0].total_tokens) <= self.allocator.free
        )

    def _has_room(self) -> bool:
        return len(self.running) < self._max_running
