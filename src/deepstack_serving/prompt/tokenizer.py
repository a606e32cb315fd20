"""The checkpoint's tokenizer and chat template, with one rule added: what a user typed never becomes a special token.

A special token's literal in user text (a placeholder, an end-of-turn mark) is data. It is hidden behind a mark while
the template is rendered, and tokenised on its own, split, where the mark stands. Texts without such literals are
tokenised exactly as transformers does.
"""

from __future__ import annotations

import re
import secrets
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, cast

import jinja2
from tokenizers import AddedToken
from transformers import AutoTokenizer

from deepstack_serving.errors import CheckpointError, InvalidRequestError
from deepstack_serving.prompt.messages import Conversation


@dataclass(frozen=True)
class VideoTexts:
    """What takes the place of the videos' placeholders in a prompt, in order."""

    placeholder: str
    texts: tuple[str, ...]

    def fill_in(self, prompt: str) -> str:
        """Raises InvalidRequestError when placeholders and videos are not the same number."""
        pieces = prompt.split(self.placeholder)
        if len(pieces) != len(self.texts) + 1:
            raise InvalidRequestError(
                f"the prompt has {len(pieces) - 1} video placeholders for {len(self.texts)} videos; send as many as it "
                "has"
            )
        return "".join(piece + text for piece, text in zip(pieces, (*self.texts, ""), strict=True))


class PromptTokenizer:
    """Not thread-safe for encoding: the tokenizers library switches special-token splitting by a shared flag.

    Image and video placeholders are special tokens even where the checkpoint's files do not mark them as such.
    """

    def __init__(self, checkpoint: Path, placeholder_ids: Sequence[int] = ()) -> None:
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{checkpoint}: the tokenizer cannot be read: {error}") from error
        for placeholder in map(self.tokenizer.added_tokens_decoder.get, placeholder_ids):
            if placeholder is not None and not placeholder.special:
                marked = AddedToken(placeholder.content, special=True, normalized=False)
                self.tokenizer.add_tokens([marked], special_tokens=True)
        literals = {token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special}
        self._literal = re.compile("|".join(map(re.escape, sorted(literals, key=len, reverse=True))) or "(?!)")

    def encode_raw(self, text: str, videos: VideoTexts | None = None) -> list[int]:
        """Token ids of a text as it stands; literals of special tokens are special tokens."""
        text = videos.fill_in(text) if videos else text
        return cast(list[int], self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def encode_chat(self, conversation: Conversation, videos: VideoTexts | None = None) -> list[int]:
        """Token ids of the rendered conversation, with the generation prompt."""
        mark = f"\ue000{secrets.token_hex(8)}\ue001"
        hidden: list[str] = []
        rendered = self._render([self._hide_message(message, mark, hidden) for message in conversation])
        # What users typed is hidden by now: a video's placeholder in the rendered text is the template's.
        pieces = (videos.fill_in(rendered) if videos else rendered).split(mark)
        if len(pieces) != len(hidden) + 1:
            raise InvalidRequestError("the chat template repeats or drops a message that holds special-token text")
        first, *rest = cast(list[list[int]], self.tokenizer(pieces, add_special_tokens=False)["input_ids"])
        literals = {literal: self._encode_as_text(literal) for literal in set(hidden)}
        return [*first, *chain.from_iterable((*literals[name], *ids) for name, ids in zip(hidden, rest, strict=True))]

    def _hide_message(self, message: dict[str, Any], mark: str, hidden: list[str]) -> dict[str, Any]:
        content = message["content"]
        if isinstance(content, str):
            return {**message, "content": self._hide(content, mark, hidden)}
        seams = self._seams(content)
        parts = [self._hide_part(part, place in seams, mark, hidden) for place, part in enumerate(content)]
        return {**message, "content": parts}

    def _hide_part(self, part: dict[str, Any], after_seam: bool, mark: str, hidden: list[str]) -> dict[str, Any]:
        if part["type"] != "text":
            return part
        if after_seam:  # a mark that stands for nothing keeps the pieces of a literal apart
            hidden.append("")
        text = self._hide(part["text"], mark, hidden)
        return {**part, "text": mark + text if after_seam else text}

    def _seams(self, parts: list[dict[str, Any]]) -> set[int]:
        """The text parts in front of which a literal would form if the template joins them to the parts before."""
        texts = [part["text"] if part["type"] == "text" else "\n" for part in parts]
        spans = [match.span() for match in self._literal.finditer("".join(texts))]
        starts = list(accumulate(map(len, texts)))[:-1]
        inside = (range(bisect_right(starts, first), bisect_left(starts, end)) for first, end in spans)
        return {index + 1 for index in chain.from_iterable(inside)}

    def _hide(self, text: str, mark: str, hidden: list[str]) -> str:
        hidden += self._literal.findall(text)
        return self._literal.sub(lambda _: mark, text)

    def _encode_as_text(self, literal: str) -> list[int]:
        ids = self.tokenizer(literal, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return cast(list[int], ids)

    def _render(self, conversation: Conversation) -> str:
        if not self.tokenizer.chat_template:
            raise InvalidRequestError(
                "this checkpoint has no chat template; send the finished prompt with 'raw_prompt'"
            )
        try:
            rendered = self.tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise InvalidRequestError(f"the chat template refuses the messages: {error}") from error
        return cast(str, rendered)
