"""From token ids to text, one token at a time: never half a character, nothing at or after a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream


class TextStream:
    """The text of one answer. What could still become a stop string is held back, at most one stop string's length."""

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._decoded = ""
        self._held = ""
        self._stop = tuple(stop)
        self.stopped = False

    def push(self, token_id: int) -> str:
        """The text that this token settles; sets `stopped` when a stop string is complete."""
        self._ids.append(token_id)
        piece = self._decoder.step(self._tokenizer, token_id) or ""
        self._decoded += piece
        return self._settle(piece)

    def flush(self) -> str:
        """The rest, at the end of the answer: what was held back, and a last incomplete character as it decodes."""
        whole = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        rest = whole[len(self._decoded) :] if whole.startswith(self._decoded) else ""
        text = self._settle(rest)
        if not self.stopped:
            text, self._held = text + self._held, ""
        return text

    def _settle(self, piece: str) -> str:
        text = self._held + piece
        found = [place for place in (text.find(stop) for stop in self._stop) if place >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text that begins a stop string."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-size:])), 0)
