"""What `deepstack chat` shows besides the answer: a waiting notice before the first token, figures after the last."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO


class WaitingNotice:
    """Counts the seconds on a terminal until `stop`; says nothing when the answer comes within `delay_s`."""

    def __init__(self, output: TextIO, delay_s: float = 2.0, tick_s: float = 1.0) -> None:
        self._output = output
        self._delay_s = delay_s
        self._tick_s = tick_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def stop(self) -> None:
        """Takes the notice away. May be called again."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def __enter__(self) -> WaitingNotice:
        if self._output.isatty():
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _run(self) -> None:
        started_s = time.monotonic()
        if self._stopped.wait(self._delay_s):
            return
        shown = ""
        while not self._stopped.is_set():
            shown = f"waiting for the server: images and prompt are being read ... {time.monotonic() - started_s:.0f} s"
            self._write(f"\r{shown}")
            self._stopped.wait(self._tick_s)
        self._write("\r" + " " * len(shown) + "\r")

    def _write(self, text: str) -> None:
        self._output.write(text)
        self._output.flush()


class Stopwatch:
    """Times one answer: to its first token, and from there to its last."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._started_s = clock()
        self._first_s: float | None = None
        self._last_s = self._started_s
        self._num_first_tokens = 0
        self._num_tokens = 0

    def count(self, num_tokens: int) -> None:
        """Tokens that have arrived just now."""
        if not num_tokens:
            return
        self._last_s = self._clock()
        if self._first_s is None:
            self._first_s, self._num_first_tokens = self._last_s, num_tokens
        self._num_tokens += num_tokens

    def summary(self) -> str:
        if self._first_s is None:
            return "no tokens"
        text = f"time to first token {self._first_s - self._started_s:.3f} s, {self._num_tokens} tokens"
        following, elapsed_s = self._num_tokens - self._num_first_tokens, self._last_s - self._first_s
        return f"{text}, {following / elapsed_s:.1f} tokens/s after the first" if following and elapsed_s else text
