"""Loads the named models into a running server, all at once, and reports how far it is."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent import futures
from dataclasses import dataclass

from deepstack_serving.embedded.control import Control
from deepstack_serving.embedded.failures import ModelLoadError, ServerStartError

_REPORT_EVERY_S = 0.5


@dataclass(frozen=True, slots=True)
class Progress:
    """What a start is waiting for. `pending` is empty while only the probe is outstanding."""

    elapsed_s: float
    pending: tuple[str, ...]


ProgressListener = Callable[[Progress], None]


def load_models(control: Control, models: Sequence[str], timeout_s: float, listener: ProgressListener) -> None:
    """Returns when all are ready; raises as soon as one has failed, with all failures known by then."""
    started_s = time.monotonic()
    pool = futures.ThreadPoolExecutor(max_workers=max(1, len(models)), thread_name_prefix="load-model")
    try:
        names = {pool.submit(control.load, model, timeout_s): model for model in models}
        pending = set(names)
        while pending:
            done, pending = futures.wait(pending, _REPORT_EVERY_S, futures.FIRST_COMPLETED)
            _raise_failures(done)
            elapsed_s = time.monotonic() - started_s
            listener(Progress(elapsed_s, tuple(names[load] for load in names if load in pending)))
            if pending and elapsed_s > timeout_s:
                waiting = ", ".join(sorted(names[load] for load in pending))
                raise ServerStartError(f"not loaded within {timeout_s:g} s: {waiting}")
    finally:
        # Calls that still wait end with the server, which the caller stops after a failure.
        pool.shutdown(wait=False, cancel_futures=True)


def _raise_failures(done: set[futures.Future[None]]) -> None:
    errors = [error for error in (load.exception() for load in done) if error is not None]
    reasons = {
        model: text for error in errors if isinstance(error, ModelLoadError) for model, text in error.reasons.items()
    }
    if reasons:
        raise ModelLoadError(reasons)
    if errors:
        raise errors[0]
