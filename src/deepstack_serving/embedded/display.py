"""Shows a person what a start is waiting for."""

from __future__ import annotations

from typing import Self, TextIO

from deepstack_serving.embedded.loading import Progress


class ProgressDisplay:
    """Says what the start is waiting for: a line that counts seconds on a terminal, else a line per change."""

    def __init__(self, output: TextIO) -> None:
        self._output = output
        self._pending: tuple[str, ...] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._output.isatty():
            self._output.write("\n")

    def show(self, progress: Progress) -> None:
        text = f"loading {', '.join(progress.pending)}" if progress.pending else "waiting for the first answer"
        if self._output.isatty():
            self._output.write(f"\r\033[K{text} ... {progress.elapsed_s:.0f} s")
        elif progress.pending != self._pending:
            self._output.write(f"{text} ... {progress.elapsed_s:.0f} s\n")
        self._pending = progress.pending
        self._output.flush()
