"""Linked calls: every language stage is called at once and runs a step, or several decode steps, with the others."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import Semaphore

import numpy as np
import torch

from deepstack_serving.engine.ports import Array, Handle
from deepstack_serving.exchange import MESSAGES, Exchange, LinkMemory, link_sizes
from deepstack_serving.wire import DECODE_STEPS, EXCHANGE

RENEW_AFTER_FAILURES = 3
RETRY_S = 60.0  # after there was no shared memory
MOST_LINK_BYTES = 64 * 2**20  # between two stages; both pin it
CallStage = Callable[[int, Mapping[str, Array]], Mapping[str, Handle]]
TokenRows = tuple[list[list[int]], list[list[float]]]  # ids and log-probabilities, [rows][steps]


class RunningBurst:
    """One burst of all stages, on threads of its own. `result` must be asked for before the next one begins."""

    def __init__(self, exchange: Exchange, rows: int, pool: ThreadPoolExecutor, stages: int, call: CallStage) -> None:
        ticket = exchange.begin()
        more = {EXCHANGE.name: np.frombuffer(ticket.encode(), dtype=np.uint8)}
        self._exchange, self._first_message = exchange, exchange.burst * MESSAGES + 1
        self._ids, self._logprobs = (LinkMemory(exchange, index) for index in (stages - 1, stages))
        self._like = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.float32)
        self._failed: list[int] = []  # stages, in the order of their failures
        self._called, self._stages = Semaphore(0), stages
        self._calls: list[Future[Mapping[str, Handle]]] = [
            pool.submit(self._guarded, call, index, more) for index in range(stages)
        ]

    def wait_until_called(self) -> None:
        """Until every stage is being called: what else would use the interpreter now would hold the calls up."""
        for _ in range(self._stages):
            self._called.acquire()

    def is_over(self, wait_s: float | None = None) -> bool:
        """Whether all stages have answered, after waiting for so long at most; None: until they have."""
        return not wait(self._calls, wait_s).not_done

    @property
    def steps(self) -> int:
        """How many steps' tokens are there already."""
        return max(0, self._logprobs.message - self._first_message + 1)

    def tokens(self, first: int, end: int) -> TokenRows:
        """Those of the steps [first, end), which must be there."""
        links = zip((self._ids, self._logprobs), self._like, strict=True)
        messages = range(self._first_message + first, self._first_message + end)
        ids, logprobs = (
            torch.stack([link.place(message, like) for message in messages], dim=1).tolist() for link, like in links
        )
        return ids, logprobs

    def end_early(self) -> None:
        """No step is begun from now on; those that run are finished."""
        self._exchange.end_early()

    def result(self) -> Mapping[str, Handle]:
        """The last stage's outputs, once all stages have answered. Raises the error of the one that failed first."""
        self.is_over()
        return self._calls[self._failed[0] if self._failed else -1].result()

    def _guarded(self, call: CallStage, index: int, more: Mapping[str, Array]) -> Mapping[str, Handle]:
        """A call that frees the others from waiting, whatever it fails of."""
        has_answered = False
        self._called.release()
        try:
            results = call(index, more)
            has_answered = True
        finally:
            if not has_answered:
                self._failed.append(index)
                self._exchange.abort()
        return results


class BurstCalls:
    """Owns the memory over which the stages exchange for one group, made at the first burst. One burst at a time."""

    def __init__(self, stages: int, max_rows: int, max_sequences: int, row_bytes: int) -> None:
        self._stages, self._max_sequences, self._row_bytes = stages, max_sequences, row_bytes
        rows = min(max_rows, MOST_LINK_BYTES // row_bytes)
        self._rows_to_try = tuple(dict.fromkeys((max(rows, max_sequences), max_sequences)))
        self._exchange: Exchange | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._retry_s = 0.0
        self._failures = 0
        self.max_rows = 0  # of a linked step

    def are_possible(self) -> bool:
        """Whether the stages can exchange; the first call makes what they need.

        Where there is no room for the rows of prompts it is made for decode steps; without any it is tried again later.
        """
        if self._exchange is None and time.monotonic() >= self._retry_s:
            self._make()
        return self._exchange is not None

    def _make(self) -> None:
        for rows in self._rows_to_try:
            try:
                self._exchange = Exchange.create(link_sizes(self._stages, rows, self._max_sequences, self._row_bytes))
            except OSError as error:
                logging.getLogger(__name__).warning(
                    "no shared memory for the stages to exchange %d rows over; what does not fit goes step by step and "
                    "stage by stage: %s",
                    rows,
                    error,
                )
            else:
                self.max_rows = rows
                self._pool = ThreadPoolExecutor(self._stages, thread_name_prefix="burst")
                return
        self._retry_s = time.monotonic() + RETRY_S

    def begin(self, steps: int, rows: int, call: CallStage) -> RunningBurst:
        """Call every stage for a step of so many rows, or for several decode steps. Only where that is possible."""
        if self._exchange is None or self._pool is None:
            raise RuntimeError("there is no memory to exchange over: ask are_possible first")
        count = {DECODE_STEPS.name: np.array([steps], dtype=np.int32)}
        return RunningBurst(
            self._exchange, rows, self._pool, self._stages, lambda index, more: call(index, {**count, **more})
        )

    def ended(self, error: Exception | None) -> None:
        """To be told how each linked call ended. After some failures in a row the next one gets memory of its own."""
        self._failures = self._failures + 1 if error else 0
        if error:
            logging.getLogger(__name__).warning("a call of all stages at once failed: %s", error)
        if self._failures >= RENEW_AFTER_FAILURES:
            self._failures = 0
            self.close()
            self._exchange = self._pool = None

    def close(self) -> None:
        """Give the memory back."""
        if self._exchange is not None and self._pool is not None:
            self._exchange.close()
            self._pool.shutdown(wait=False)
