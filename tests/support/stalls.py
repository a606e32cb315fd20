"""How long this machine stood still: Triton's Python backend takes a process that is silent for a second for dead."""

from __future__ import annotations

import threading
import time

TICK_S = 0.05


class StallWatch:
    """Measures, on a thread of its own, by how much a short sleep was overslept at most. A context manager."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> StallWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        before_s = time.time()  # the clock that Triton's time limits are measured by, jumps included
        while not self._stopped.wait(TICK_S):
            now_s = time.time()
            self.longest_s = max(self.longest_s, now_s - before_s - TICK_S)
            before_s = now_s
