"""One scan of 8x8 pixels becomes an ink mask of any size; used by pictures.py.

`Style` says how far a mask may stray from its scan: `PLAIN` for the pictures that are shown and measured, `AUGMENTED`
for training, which covers `PLAIN` and goes beyond it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from demo.digits import Scans

BORDER = 1


@dataclass(frozen=True)
class Style:
    """Upper bounds of the random changes; angles in degrees, the other lengths as shares of the scan's side."""

    turn_degrees: float
    slant: float
    corner_shift: float
    threshold_low: float
    threshold_high: float
    gain_low: float
    gain_high: float
    blend_share: float
    speckle: float
    paper_noise: int


PLAIN = Style(5.0, 0.08, 0.02, 0.20, 0.32, 1.6, 2.4, 0.0, 0.0, 6)
AUGMENTED = Style(13.0, 0.22, 0.07, 0.08, 0.42, 1.1, 3.2, 0.25, 10.0, 14)


def draw_scan(random: np.random.Generator, scans: Scans, digit: int, style: Style) -> tuple[Image.Image, int]:
    """A scan of this digit with an empty border, and its row in the data set. May blend in a second one of its kind."""
    positions = scans.positions_of(digit)
    first = int(random.choice(positions))
    pixels = scans.pixels[first].astype(np.float32)
    if random.random() < style.blend_share:
        weight = random.uniform(0.0, 0.45)
        pixels = (1 - weight) * pixels + weight * scans.pixels[int(random.choice(positions))]
    if style.speckle:
        pixels = pixels + random.normal(0, style.speckle, pixels.shape)
    framed = np.zeros((8 + 2 * BORDER, 8 + 2 * BORDER), np.uint8)
    framed[BORDER:-BORDER, BORDER:-BORDER] = np.clip(pixels, 0, 255)
    return Image.fromarray(framed), int(scans.rows[first])


def ink_mask(random: np.random.Generator, scan: Image.Image, size: tuple[int, int], style: Style) -> Image.Image:
    """Enlarge smoothly while turning, slanting and bending; then choose how thick and how sharp the strokes are."""
    bent = scan.transform(size, Image.Transform.QUAD, _corners(random, scan.width, style), Image.Resampling.BICUBIC)
    threshold = random.uniform(style.threshold_low, style.threshold_high)
    gain = random.uniform(style.gain_low, style.gain_high)
    levels = np.clip((np.arange(256) / 255 - threshold) * gain + 0.25, 0, 1) * 255
    levels[: int(255 * threshold * 0.5)] = 0
    return Image.fromarray(levels.astype(np.uint8)[np.asarray(bent)])


def _corners(random: np.random.Generator, side: int, style: Style) -> tuple[float, ...]:
    """The source corners (north-west, south-west, south-east, north-east) that the target's corners are taken from."""
    square: NDArray[np.float64] = np.array([(-0.5, -0.5), (-0.5, 0.5), (0.5, 0.5), (0.5, -0.5)])
    angle = np.deg2rad(random.uniform(-style.turn_degrees, style.turn_degrees))
    slant = random.uniform(-style.slant, style.slant)
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    bent = square @ (turn @ np.array([[1.0, slant], [0.0, 1.0]])).T
    bent += random.uniform(-style.corner_shift, style.corner_shift, bent.shape)
    return tuple(float(value) for value in ((bent + 0.5) * side).reshape(-1))
