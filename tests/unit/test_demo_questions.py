"""Every question has one answer, and the answer says what the truth says."""

from __future__ import annotations

import numpy as np
import pytest

from demo.pictures import PLACES, Truth
from demo.questions import TEMPLATES, Claims, Kind, answer, choose_question, parse, vary

TRUTH = Truth("04731", "left of", "red", "circle", 208, 128, (1, 2, 3, 4, 5))


@pytest.mark.parametrize(
    ("kind", "claims"),
    [
        (Kind.READ, Claims("04731", None, None, None)),
        (Kind.PLACE, Claims(None, "left of", "red", None)),
        (Kind.COLOUR, Claims(None, None, "red", None)),
        (Kind.SHAPE, Claims(None, None, None, "circle")),
        (Kind.BOTH, Claims("04731", "left of", "red", None)),
    ],
)
def test_an_answer_parses_back_to_the_truth(kind: Kind, claims: Claims) -> None:
    assert parse(answer(kind, TRUTH)) == claims


@pytest.mark.parametrize("place", PLACES)
def test_every_place_parses_back(place: str) -> None:
    truth = Truth("123", place, "blue", "square", 0, 0, ())
    assert parse(answer(Kind.PLACE, truth)).place == place


def test_a_text_without_facts_claims_nothing() -> None:
    assert parse("I see no picture.") == Claims(None, None, None, None)


def test_no_template_belongs_to_two_kinds() -> None:
    templates = [template.lower() for group in TEMPLATES.values() for template in group]
    assert len(templates) == len(set(templates))


def test_a_varied_question_keeps_its_words() -> None:
    random = np.random.default_rng(0)
    for _ in range(200):
        question = choose_question(random, Kind.READ)
        assert question.lower().rstrip("?.! ") in vary(random, question).lower()
