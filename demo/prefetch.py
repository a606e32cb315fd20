"""Takes batches out of the workers' shared memory on a thread, so that the training loop never waits for that."""

from __future__ import annotations

from collections.abc import Iterator
from queue import Queue
from threading import Thread

from demo.batches import Batch

DEPTH = 6


def fetch_ahead(batches: Iterator[Batch]) -> Iterator[Batch]:
    """The same batches in the same order, copied to ordinary memory. An error of the source is raised here."""
    fetched: Queue[Batch | Exception] = Queue(DEPTH)
    Thread(target=_fetch, args=(batches, fetched), daemon=True).start()
    while not isinstance(item := fetched.get(), Exception):
        yield item
    if not isinstance(item, StopIteration):
        raise item


def _fetch(batches: Iterator[Batch], fetched: Queue[Batch | Exception]) -> None:
    try:
        while True:
            fetched.put(Batch(*(values.clone() for values in next(batches))))
    except (StopIteration, RuntimeError, ValueError, KeyError) as error:
        fetched.put(error)
