"""Two answers side by side: the first token that differs, and log-probabilities as far as they are comparable."""

from __future__ import annotations

import math

import pytest

from deepstack_serving.audit.comparison import Answer, Difference, Token, compare


def token(identity: int, **likeliest: float) -> Token:
    """`t7=-1.0` lists token 7."""
    listed = {int(name[1:]): value for name, value in likeliest.items()}
    return Token(identity, listed[identity], listed)


def test_same_answers_do_not_differ() -> None:
    one = Answer((token(1, t1=-0.5, t2=-1.0), token(2, t2=-0.25)))
    assert compare(one, one) == Difference(None, 0.0, 0.0)
    assert compare(one, one).within(0)


def test_alternatives_count_beside_the_answers_own_tokens() -> None:
    difference = compare(Answer((token(1, t1=-0.5, t2=-1.0),)), Answer((token(1, t1=-0.5, t2=-1.75),)))
    assert difference == Difference(None, 0.75, 0.75)
    assert not difference.is_none


@pytest.mark.parametrize(("own", "likely"), [(1, 0.25), (2, 2.0)])
def test_unlikely_tokens_are_left_out_of_a_tolerance_unless_they_are_the_answers_own(own: int, likely: float) -> None:
    one, other = (token(own, t1=-0.5, t2=-9.0), token(own, t1=-0.75, t2=-11.0))
    assert compare(Answer((one,)), Answer((other,))) == Difference(None, 2.0, likely)


def test_nothing_is_compared_after_the_first_other_token() -> None:
    one = Answer((token(1, t1=-0.5), token(2, t2=-0.5, t3=-0.75), token(4, t4=-9.0)))
    other = Answer((token(1, t1=-0.5), token(3, t3=-0.5, t2=-1.0), token(4, t4=-1.0)))
    assert compare(one, other) == compare(other, one) == Difference(1, 0.5, 0.5, 0.25)


def test_token_that_only_one_lists_is_as_far_as_the_others_last() -> None:
    difference = compare(Answer((token(1, t1=-0.5, t2=-1.0),)), Answer((token(3, t3=-0.25, t4=-3.0),)))
    assert difference == Difference(0, 2.5, 2.5, math.inf)


@pytest.mark.parametrize(
    ("difference", "tolerance", "same"),
    [
        (Difference(None, 0.0, 0.0), 0.0, True),
        (Difference(None, 1e-9, 0.0), 0.0, False),
        (Difference(3, 0.0, 0.0, 0.0), 0.0, False),
        (Difference(None, 5.0, 0.1), 0.1, True),
        (Difference(None, 5.0, 0.2), 0.1, False),
        (Difference(3, 5.0, 0.1, 0.1), 0.1, True),
        (Difference(3, 5.0, 0.1, 0.2), 0.1, False),
        (Difference(3, 5.0, 0.0, math.inf), 0.1, False),
    ],
)
def test_within_a_tolerance_only_near_ties_change_places(difference: Difference, tolerance: float, same: bool) -> None:
    assert difference.within(tolerance) is same


def test_longer_answer_parts_where_the_shorter_ends() -> None:
    one = Answer((token(1, t1=-0.5), token(2, t2=-0.5)))
    assert compare(one, Answer(one.tokens[:1])) == Difference(1, 0.0, 0.0, math.inf)
