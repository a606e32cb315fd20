"""Takes batches out of the workers' shared memory on a thread, so that the training loop never waits for that."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from queue import Empty, Queue
from threading import Thread

from torch import Tensor

from demo.batches import Batch, map_tensors

DEPTH = 6
REUSED = 48
"""How many recent batches `reuse` draws from, and how many there must be before it does."""


def fetch_ahead(batches: Iterator[Batch], reuse: bool = False) -> Iterator[Batch]:
    """The same batches in the same order, copied to ordinary memory. An error of the source is raised here.

    With `reuse`, recent batches come again in between whenever the next one is not ready, so what comes depends on the
    clock.
    """
    fetched: Queue[Batch | Exception] = Queue(DEPTH)
    Thread(target=_fetch, args=(batches, fetched), daemon=True).start()
    recent: deque[Batch] = deque(maxlen=REUSED)
    while True:
        try:
            item = fetched.get(block=not reuse or len(recent) < REUSED)
        except Empty:
            yield random.choice(recent)
            continue
        if isinstance(item, Exception):
            break
        if reuse:
            recent.append(item)
        yield item
    if not isinstance(item, StopIteration):
        raise item


def _fetch(batches: Iterator[Batch], fetched: Queue[Batch | Exception]) -> None:
    try:
        while True:
            fetched.put(map_tensors(next(batches), Tensor.clone))
    except (StopIteration, RuntimeError, ValueError, KeyError) as error:
        fetched.put(error)
