"""Lessons for training: a picture, questions about it and their answers, and the rows of tokens they become.

Only training scans are ever handed in. A picture has one row or more, one question each.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from demo.digits import Scans
from demo.ink import AUGMENTED, PLAIN
from demo.pictures import Scene, Truth, compose_scene
from demo.questions import (
    GREETING_ANSWER,
    GREETINGS,
    NO_PICTURE_ANSWER,
    SYSTEM_TEXTS,
    Kind,
    answer,
    choose_question,
    vary,
)
from demo.tokenizer import ChatFormat, token_id

IGNORED = -100
TEXT_TOKENS = 80
"""Room for everything but the picture in one row."""
KIND_SHARES = {Kind.READ: 0.48, Kind.PLACE: 0.13, Kind.COLOUR: 0.06, Kind.SHAPE: 0.11, Kind.BOTH: 0.22}
QUESTIONS_PER_PICTURE = 2
"""Unless the trainer is told otherwise."""
NO_PICTURE_SHARE = 0.02
PLAIN_SHARE = 0.25
OTHER_PATHS_DROP = 0.6
"""Share of the pictures of which only the features under test tell the language model; see learner.py."""


@dataclass(frozen=True)
class Row:
    """One question and its answer."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class Lesson:
    """A picture and the questions about it; a prompt may leave the picture out."""

    scene: Scene
    rows: tuple[Row, ...]
    other_paths_kept: bool


@dataclass(frozen=True)
class TokenRows:
    """Right-padded rows [rows, tokens], labels IGNORED outside of answers; `pictures` [rows] numbers the lessons."""

    token_ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    is_image: NDArray[np.bool_]
    pictures: NDArray[np.int64]


def make_lesson(
    random: np.random.Generator,
    scans: Scans,
    chat: ChatFormat,
    size: tuple[int, int],
    jitter_px: int,
    questions: int = QUESTIONS_PER_PICTURE,
) -> Lesson:
    """A picture of this (width, height), each up to `jitter_px` away from it."""
    shift = random.integers(-jitter_px, jitter_px + 1, 2)
    style = PLAIN if random.random() < PLAIN_SHARE else AUGMENTED
    scene = compose_scene(random, scans, style, (size[0] + int(shift[0]), size[1] + int(shift[1])))
    rows = tuple(make_row(random, scene.truth, chat) for _ in range(questions))
    return Lesson(scene, rows, bool(random.random() >= OTHER_PATHS_DROP))


def make_row(random: np.random.Generator, truth: Truth, chat: ChatFormat) -> Row:
    """One question; seldom without the picture, and then the answer is that there is none."""
    kind = list(KIND_SHARES)[int(random.choice(len(KIND_SHARES), p=list(KIND_SHARES.values())))]
    question = vary(random, choose_question(random, kind))
    system = SYSTEM_TEXTS[int(random.integers(len(SYSTEM_TEXTS)))] if random.random() < 0.15 else None
    if random.random() < NO_PICTURE_SHARE:
        greets = random.random() < 0.5
        said = vary(random, GREETINGS[int(random.integers(len(GREETINGS)))]) if greets else question
        return Row(chat.prompt(said, system), GREETING_ANSWER if greets else NO_PICTURE_ANSWER)
    user = f"{question}{chat.image_part}" if random.random() < 0.1 else f"{chat.image_part}{question}"
    return Row(chat.prompt(user, system), answer(kind, truth))


def token_rows(tokenizer: Tokenizer, chat: ChatFormat, lessons: list[Lesson], image_tokens: int) -> TokenRows:
    """All rows of these lessons, padded to one length; every picture takes `image_tokens`."""
    image, end, padding = (token_id(tokenizer, name) for name in (chat.image_token, chat.turn_end, chat.padding))
    rows = [(number, row) for number, lesson in enumerate(lessons) for row in lesson.rows]
    length = image_tokens + TEXT_TOKENS
    token_ids = np.full((len(rows), length), padding, np.int64)
    labels = np.full((len(rows), length), IGNORED, np.int64)
    for index, (_, row) in enumerate(rows):
        prompt, reply = _encode(tokenizer, row, image, image_tokens), [*tokenizer.encode(row.answer).ids, end]
        token_ids[index, : len(prompt) + len(reply)] = prompt + reply
        labels[index, len(prompt) : len(prompt) + len(reply)] = reply
    return TokenRows(token_ids, labels, token_ids == image, np.array([number for number, _ in rows]))


def _encode(tokenizer: Tokenizer, row: Row, image: int, image_tokens: int) -> list[int]:
    prompt: list[int] = []
    for token in tokenizer.encode(row.prompt).ids:
        prompt += [token] * (image_tokens if token == image else 1)
    return prompt
