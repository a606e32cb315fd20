"""Pictures come out the same for the same seed and show what their truth says."""

from __future__ import annotations

import numpy as np
import pytest

from demo.digits import load_split
from demo.ink import AUGMENTED, PLAIN, Style
from demo.pictures import CELL_PX, MAX_PIXELS, MIN_PIXELS, PLACES, Scene, compose, compose_scene

SEEDS = range(60)


def scenes(style: Style = PLAIN) -> list[Scene]:
    return [compose_scene(np.random.default_rng(seed), load_split().held_out, style) for seed in SEEDS]


@pytest.mark.parametrize("style", [PLAIN, AUGMENTED])
def test_the_same_seed_draws_the_same_pixels(style: Style) -> None:
    first, second = (compose(np.random.default_rng(3), load_split().train, style) for _ in range(2))
    assert first[0].tobytes() == second[0].tobytes()
    assert first[1] == second[1]


def test_another_seed_draws_another_picture() -> None:
    first, second = (compose(np.random.default_rng(seed), load_split().train)[0] for seed in (3, 4))
    assert first.size != second.size or first.tobytes() != second.tobytes()


def test_only_scans_of_the_side_handed_in_are_drawn() -> None:
    drawn = {row for scene in scenes() for row in scene.truth.rows}
    assert drawn <= set(load_split().held_out.rows.tolist())


def test_the_scans_drawn_show_the_digits_of_the_number() -> None:
    held_out = load_split().held_out
    labels = dict(zip(held_out.rows.tolist(), held_out.labels.tolist(), strict=True))
    for scene in scenes():
        assert scene.truth.number == "".join(str(labels[row]) for row in scene.truth.rows)


def test_numbers_have_three_to_six_digits() -> None:
    assert {len(scene.truth.number) for scene in scenes()} == {3, 4, 5, 6}


def test_every_place_occurs_and_the_mark_stands_there() -> None:
    for scene in scenes():
        left, right = scene.digits[0].left, max(box.left + box.width for box in scene.digits)
        top, bottom = min(box.top for box in scene.digits), max(box.top + box.height for box in scene.digits)
        stands = {
            "left of": scene.mark.left + scene.mark.width < left,
            "right of": scene.mark.left > right,
            "above": scene.mark.top + scene.mark.height < top,
            "below": scene.mark.top > bottom,
        }
        assert stands[scene.truth.place]
    assert {scene.truth.place for scene in scenes()} == set(PLACES)


def test_everything_is_inside_the_picture() -> None:
    for scene in scenes():
        for box in (*scene.digits, scene.mark):
            assert box.left >= 0
            assert box.top >= 0
            assert box.left + box.width <= scene.picture.width
            assert box.top + box.height <= scene.picture.height


def test_a_picture_takes_40_to_144_image_tokens() -> None:
    counts = [round(s.picture.width / CELL_PX) * round(s.picture.height / CELL_PX) for s in scenes()]
    assert min(counts) >= MIN_PIXELS // CELL_PX**2 == 40
    assert max(counts) <= MAX_PIXELS // CELL_PX**2 == 144
