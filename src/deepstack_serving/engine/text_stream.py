"""From token ids to text, as they come: never half a character, nothing at or after a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_INCOMPLETE = "\ufffd"
_LONGEST_INCOMPLETE = 16  # tokens that may wait for the end of a character before the whole ones among them are told
_CHARACTER_BYTES = 4


class TextStream:
    """The text of one answer. What could still become a stop string is held back, at most one stop string's length."""

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._decoder = _Decoder(tokenizer)
        self._ids: list[int] = []
        self._pieces: list[str] = []
        self._held = ""
        self._stop = tuple(stop)
        self.stopped = False

    def push(self, token_id: int) -> str:
        """The text that this token settles; sets `stopped` when a stop string is complete."""
        return self.push_all([token_id])

    def push_all(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens settle; for an answer with stop strings they come one by one."""
        self._ids += token_ids
        piece = self._decoder.step(token_ids)
        self._pieces.append(piece)
        return self._settle(piece)

    def keep(self, token_ids: Sequence[int]) -> None:
        """Tokens of an answer that is told whole, at its end, by `flush`."""
        self._ids += token_ids

    def flush(self) -> str:
        """The rest, at the end of the answer: what was held back, and a last incomplete character as it decodes."""
        whole, told = self._tokenizer.decode(self._ids, skip_special_tokens=True), "".join(self._pieces)
        text = self._settle(whole[len(told) :] if whole.startswith(told) else "")
        if not self.stopped:
            text, self._held = text + self._held, ""
        return text

    def _settle(self, piece: str) -> str:
        if not self._stop:
            return piece
        text = self._held + piece
        found = [place for place in (text.find(stop) for stop in self._stop) if place >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


class _Decoder:
    """Decodes a window of the last tokens, whose text says what the new ones among them add.

    The window begins with tokens that are told already: a token's text may depend on the one before it. It is short,
    whatever the tokens are, so that a long answer costs no more per token than a short one.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._told, self._told_text = 0, ""

    def step(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete."""
        self._window += token_ids
        text = self._text(self._window)
        if text.endswith(_INCOMPLETE):
            return self._without_end(text) if len(self._window) - self._told >= _LONGEST_INCOMPLETE else ""
        new = text[len(self._told_text) :]
        if new:
            self._window = self._window[self._told :]
            self._told, self._told_text = len(self._window), self._text(self._window)
        else:
            del self._window[self._told :]
        return new

    def _without_end(self, text: str) -> str:
        """Bytes that are no text at all may go on for ever: tell all but the end, which may become a character."""
        for place in range(len(self._window) - _CHARACTER_BYTES, self._told, -1):
            before, after = self._text(self._window[:place]), self._text(self._window[place:])
            if before + after == text and len(after) >= _CHARACTER_BYTES:  # so no character lies across the place
                new = before[len(self._told_text) :]
                self._window, self._told, self._told_text = self._window[place:], 0, ""
                return new
        self._window[self._told :] = [token_id for token_id in self._window[self._told :] if self._text([token_id])]
        return ""

    def _text(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text that begins a stop string."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-size:])), 0)
