"""Requests of exactly so many tokens: a picture of its own each, and a question of digits, each of which is a token."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bench.failures import BenchError
from bench.records import Case, Record
from deepstack_serving.audit.pictures import picture_jpeg

IMAGE_TEXT_TOKENS = 66  # beside the picture's own: 64 and the two marks around it, as the peers are measured with
TEXT_TOKENS = 128
_PROCESSES = 8


@dataclass(frozen=True)
class Overheads:
    """Tokens that the chat template adds to a question without, and with a picture and its own tokens."""

    text: int
    image: int


class Requests:
    """Makes requests; `folder` takes their pictures, JPEG files of `side_px` squared at quality 90."""

    def __init__(self, folder: Path, side_px: int, output_tokens: int) -> None:
        self.output_tokens = output_tokens
        self._folder, self._side_px = folder, side_px
        self._made = 0
        self._overheads: Overheads | None = None

    def learn(self, count: Callable[[Case], int]) -> dict[str, int]:
        """Find out what a question of one digit takes, with and without a picture; `count` gives a prompt's tokens."""
        plain, pictured = count(Case(None, "1", 1)), count(Case(self._pictures(1)[0], "1", 1))
        self._overheads = Overheads(plain - 1, pictured - 1)
        return {"text": plain - 1, "image": pictured - 1}

    def image(self, count: int, image_tokens: int | None, output_tokens: int | None = None) -> list[Case]:
        """Requests with a picture; where `image_tokens` is known, with 66 text tokens, else with as many digits."""
        template = 0 if image_tokens is None else self._known().image - image_tokens
        questions = self._questions(count, IMAGE_TEXT_TOKENS - template)
        tokens = output_tokens or self.output_tokens
        return [Case(path, question, tokens) for path, question in zip(self._pictures(count), questions, strict=True)]

    def text(self, count: int, output_tokens: int | None = None) -> list[Case]:
        """Requests of 128 text tokens."""
        questions = self._questions(count, TEXT_TOKENS - self._known().text)
        return [Case(None, question, output_tokens or self.output_tokens) for question in questions]

    def _known(self) -> Overheads:
        if self._overheads is None:
            raise BenchError("the tokens of the chat template are not known")
        return self._overheads

    def _questions(self, count: int, digits: int) -> list[str]:
        if digits < 1:
            raise BenchError("the chat template alone takes more tokens than the requests are to have")
        start = self._made
        self._made += count
        return ["".join(random.Random(start + index).choices("0123456789", k=digits)) for index in range(count)]

    def _pictures(self, count: int) -> list[str]:
        """Files of pictures that no request before had; several processes draw when they are many."""
        first = sum(1 for _ in self._folder.glob("*.jpg"))
        paths = [self._folder / f"{first + index}.jpg" for index in range(count)]
        plans = [(path, self._side_px) for path in paths]
        if count > _PROCESSES:
            with ProcessPoolExecutor(_PROCESSES) as pool:
                list(pool.map(_draw, plans, chunksize=4))
        else:
            for plan in plans:
                _draw(plan)
        return [str(path) for path in paths]


def _draw(plan: tuple[Path, int]) -> None:
    path, side_px = plan
    path.write_bytes(picture_jpeg(int(path.stem), (side_px, side_px)))


def check_lengths(records: Sequence[Record], wanted: int) -> None:
    """Raises BenchError when a prompt did not have the tokens that it was to have."""
    wrong = sorted({record.input_tokens for record in records} - {wanted})
    if wrong:
        raise BenchError(f"prompts of {wrong} tokens instead of {wanted}")
