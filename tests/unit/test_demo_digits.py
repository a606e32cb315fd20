"""The scans are split once, before anything else sees them."""

from __future__ import annotations

import numpy as np

from demo.digits import HELD_OUT_SHARE, load_split


def test_no_scan_is_on_both_sides() -> None:
    split = load_split()
    assert set(split.train.rows).isdisjoint(split.held_out.rows)


def test_every_scan_is_on_one_side() -> None:
    split = load_split()
    assert sorted([*split.train.rows, *split.held_out.rows]) == list(range(1797))


def test_every_digit_is_held_out_in_the_same_share() -> None:
    split = load_split()
    held_out, train = np.bincount(split.held_out.labels), np.bincount(split.train.labels)
    assert np.allclose(held_out / (held_out + train), HELD_OUT_SHARE, atol=0.005)


def test_no_held_out_scan_has_the_pixels_of_a_training_scan() -> None:
    split = load_split()
    train = {pixels.tobytes() for pixels in split.train.pixels}
    assert not any(pixels.tobytes() in train for pixels in split.held_out.pixels)


def test_the_split_is_the_same_every_time() -> None:
    assert np.array_equal(load_split.__wrapped__().held_out.rows, load_split().held_out.rows)
