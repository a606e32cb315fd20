"""The calls of a burst: every language stage is called at once and runs several decode steps with the others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial

import numpy as np

from deepstack_serving.engine.ports import Array, Handle
from deepstack_serving.errors import DeepstackError
from deepstack_serving.exchange import Exchange, link_sizes
from deepstack_serving.wire import DECODE_STEPS, EXCHANGE

_EXPECTED = (DeepstackError, type(None))
CallStage = Callable[[int, Mapping[str, Array]], Mapping[str, Handle]]


class BurstCalls:
    """Owns the memory over which the stages exchange, made at the first burst. One burst at a time."""

    def __init__(self, stages: int, max_sequences: int, row_bytes: int) -> None:
        self._stages = stages
        self._sizes = link_sizes(stages, max_sequences, row_bytes)
        self._exchange: Exchange | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._is_impossible = False

    def are_possible(self) -> bool:
        """Whether the stages can exchange; the first call makes what they need."""
        if self._stages == 1 or self._exchange is not None:
            return True
        if not self._is_impossible:
            try:
                self._exchange = Exchange.create(self._sizes)
            except OSError as error:
                self._is_impossible = True
                logging.getLogger(__name__).warning(
                    "decode steps go one by one: no shared memory for the stages to exchange over (%s)", error
                )
            else:
                self._pool = ThreadPoolExecutor(self._stages - 1, thread_name_prefix="burst")
        return self._exchange is not None

    def run(self, steps: int, call: CallStage) -> Mapping[str, Handle]:
        """The last stage's outputs. When a call fails the other stages give up, and its error is raised."""
        more = {DECODE_STEPS.name: np.array([steps], dtype=np.int32)}
        if self._exchange is None or self._pool is None:
            return call(self._stages - 1, more)
        more[EXCHANGE.name] = np.frombuffer(self._exchange.begin().encode(), dtype=np.uint8)
        failures: list[DeepstackError] = []
        others = [
            self._pool.submit(_guarded, self._exchange, failures, partial(call, index, more))
            for index in range(self._stages - 1)
        ]
        try:
            results = _guarded(self._exchange, failures, partial(call, self._stages - 1, more))
        except DeepstackError:
            results = {}
        finally:
            wait(others)
        surprises = [error for error in (other.exception() for other in others) if not isinstance(error, _EXPECTED)]
        for error in (*surprises, *failures):  # the first failure is the cause of the others
            raise error
        return results

    def close(self) -> None:
        """Give the memory back."""
        if self._exchange is not None and self._pool is not None:
            self._exchange.close()
            self._pool.shutdown(wait=False)


def _guarded(
    exchange: Exchange, failures: list[DeepstackError], call: Callable[[], Mapping[str, Handle]]
) -> Mapping[str, Handle]:
    """A call that frees the others from waiting, whatever it fails of."""
    has_answered = False
    try:
        results = call()
        has_answered = True
    except DeepstackError as error:
        failures.append(error)
        raise
    finally:
        if not has_answered:
            exchange.abort()
    return results
