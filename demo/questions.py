"""Questions about a picture and their answers as whole sentences; and back from an answer to what it claims."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from demo.pictures import COLOURS, PLACES, SHAPES, Truth


class Kind(StrEnum):
    """What a question asks for."""

    READ = "read"
    PLACE = "place"
    COLOUR = "colour"
    SHAPE = "shape"
    BOTH = "both"


TEMPLATES: dict[Kind, tuple[str, ...]] = {
    Kind.READ: (
        "What number is in the picture?",
        "What number is this?",
        "What is the number?",
        "Read the number.",
        "Read the handwritten number.",
        "Which number do you see?",
        "Which number is written here?",
        "What does it say?",
        "Read the digits from left to right.",
        "Please read the number in this image.",
    ),
    Kind.PLACE: (
        "Where is the mark?",
        "Where is the coloured mark?",
        "Where does the mark stand?",
        "Where is the mark relative to the number?",
        "On which side of the number is the mark?",
        "Is the mark left of, right of, above or below the number?",
    ),
    Kind.COLOUR: (
        "What colour is the mark?",
        "What color is the mark?",
        "Which colour does the mark have?",
        "Name the colour of the mark.",
    ),
    Kind.SHAPE: (
        "What shape is the mark?",
        "Which shape does the mark have?",
        "Is the mark a circle, a square or a triangle?",
    ),
    Kind.BOTH: (
        "Read the number and say where the mark is.",
        "What number is in the picture, and where is the mark?",
        "Describe the picture.",
        "What is in the picture?",
        "What do you see?",
    ),
}

GREETINGS = ("Hello!", "Hi.", "Good morning.", "Who are you?", "What can you do?", "Can you help me?", "Thank you!")
GREETING_ANSWER = "Hello! Send me a picture of a handwritten number and ask me to read it."
NO_PICTURE_ANSWER = "I see no picture. Please send one with a handwritten number."
SYSTEM_TEXTS = (
    "You are a helpful assistant.",
    "You read handwritten numbers.",
    "Answer in one sentence.",
    "You are a careful reader of digits. Be brief.",
)


@dataclass(frozen=True)
class Claims:
    """What an answer says; None where it says nothing."""

    number: str | None
    place: str | None
    colour: str | None
    shape: str | None


def answer(kind: Kind, truth: Truth) -> str:
    """The one right answer."""
    reading = f"The number is {truth.number}."
    placing = f"The {truth.colour} mark is {truth.place} the number."
    return {
        Kind.READ: reading,
        Kind.PLACE: placing,
        Kind.COLOUR: f"The mark is {truth.colour}.",
        Kind.SHAPE: f"The mark is a {truth.shape}.",
        Kind.BOTH: f"{reading} {placing}",
    }[kind]


def choose_question(random: np.random.Generator, kind: Kind) -> str:
    """One of the templates of this kind, as written."""
    templates = TEMPLATES[kind]
    return templates[int(random.integers(len(templates)))]


def vary(random: np.random.Generator, question: str) -> str:
    """The same question as people type it: without capital, without full stop, with a please or a space too many."""
    if random.random() < 0.2:
        question = question.lower()
    if random.random() < 0.15:
        question = question.rstrip("?.!")
    if random.random() < 0.1:
        question = f"Please {question[0].lower()}{question[1:]}"
    if random.random() < 0.05:
        question = f"{question} "
    return question


def parse(text: str) -> Claims:
    """Read an answer back, forgiving about what stands around the facts."""
    return Claims(
        number=_first(r"\bnumber is (\d+)", text),
        place=_first(rf"\bmark is ({'|'.join(PLACES)})\b", text),
        colour=_first(rf"\b({'|'.join(COLOURS)})\b", text),
        shape=_first(rf"\b({'|'.join(SHAPES)})\b", text),
    )


def domain_text() -> list[str]:
    """Everything that questions and answers can contain, once: what the tokenizer is trained on."""
    texts = [template for templates in TEMPLATES.values() for template in templates]
    texts += [*GREETINGS, GREETING_ANSWER, NO_PICTURE_ANSWER, *SYSTEM_TEXTS, "system", "user", "assistant"]
    for place in PLACES:
        for colour in COLOURS:
            for shape in SHAPES:
                truth = Truth("0123456789", place, colour, shape, 0, 0, ())
                texts += [answer(kind, truth) for kind in Kind]
    return texts + [text.lower() for text in texts]


def _first(pattern: str, text: str) -> str | None:
    found = re.search(pattern, text)
    return found.group(1) if found else None
