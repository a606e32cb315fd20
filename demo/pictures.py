"""Composes a picture: a handwritten number of 3 to 6 digits and one coloured mark beside, above or below it.

Everything is drawn from one seeded generator, so the same seed gives the same pixels. The truth that comes along is
what questions.py turns into answers. Lengths inside the layout are in digit heights until `_fit` chooses the scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

from demo.digits import Scans
from demo.ink import PLAIN, Style, draw_scan, ink_mask

CELL_PX = 16
"""One image token covers a square of this side: patch 8, merged 2 x 2."""
MIN_PIXELS = 64 * 160
MAX_PIXELS = 144 * CELL_PX * CELL_PX
SIZES = tuple(
    (width, height)
    for height in range(64, 177, CELL_PX)
    for width in range(160, 289, CELL_PX)
    if width >= height and MIN_PIXELS <= width * height <= MAX_PIXELS
)
"""Picture sizes (width, height) in pixels; a picture may be up to SIZE_JITTER_PX away from one."""
SIZE_JITTER_PX = 7
MARGIN_PX = 4
DIGIT_PX = (22.0, 50.0)

PLACES = ("left of", "right of", "above", "below")
COLOURS = {
    "red": (215, 35, 40),
    "green": (40, 160, 60),
    "blue": (40, 85, 220),
    "yellow": (235, 205, 30),
    "orange": (245, 130, 20),
    "purple": (140, 50, 170),
}
SHAPES = ("circle", "square", "triangle")


@dataclass(frozen=True)
class Truth:
    """What is in the picture. `rows` are the scans' rows in the data set."""

    number: str
    place: str
    colour: str
    shape: str
    width_px: int
    height_px: int
    rows: tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """A rectangle; in pixels once the layout is fitted."""

    left: float
    top: float
    width: float
    height: float


@dataclass(frozen=True)
class Scene:
    """A picture, what is in it, and where: the digits' boxes from left to right and the mark's."""

    picture: Image.Image
    truth: Truth
    digits: tuple[Box, ...]
    mark: Box


def choose_size(random: np.random.Generator) -> tuple[int, int]:
    """A picture size (width, height), seldom a multiple of the cell."""
    width, height = SIZES[int(random.integers(len(SIZES)))]
    shift = random.integers(-SIZE_JITTER_PX, SIZE_JITTER_PX + 1, 2)
    return width + int(shift[0]), height + int(shift[1])


def compose(
    random: np.random.Generator, scans: Scans, style: Style = PLAIN, size: tuple[int, int] | None = None
) -> tuple[Image.Image, Truth]:
    """One picture and its truth; `size` is (width, height) in pixels."""
    scene = compose_scene(random, scans, style, size)
    return scene.picture, scene.truth


def compose_scene(
    random: np.random.Generator, scans: Scans, style: Style = PLAIN, size: tuple[int, int] | None = None
) -> Scene:
    """`compose` with the boxes."""
    width, height = size or choose_size(random)
    number = [int(digit) for digit in random.integers(0, 10, int(random.integers(3, 7)))]
    place = PLACES[int(random.integers(len(PLACES)))]
    digits, mark = _fit(random, *_lay_out(random, len(number), place), width, height)
    paper, ink = _choose_paper_and_ink(random)
    picture = Image.new("RGB", (width, height), paper)
    rows = []
    for digit, box in zip(number, digits, strict=True):
        scan, row = draw_scan(random, scans, digit, style)
        mask = ink_mask(random, scan, (max(1, round(box.width)), max(1, round(box.height))), style)
        picture.paste(ink, (round(box.left), round(box.top)), mask)
        rows.append(row)
    colour, shape = _draw_mark(random, picture, mark)
    picture = _add_noise(random, picture, style)
    truth = Truth("".join(map(str, number)), place, colour, shape, width, height, tuple(rows))
    return Scene(picture, truth, tuple(digits), mark)


def _lay_out(random: np.random.Generator, count: int, place: str) -> tuple[list[Box], Box]:
    heights = random.uniform(0.88, 1.12, count)
    widths = heights * random.uniform(0.75, 0.98, count)
    gaps = random.uniform(-0.02, random.uniform(0.05, 0.45), count)
    lefts = np.cumsum(widths + gaps) - widths - gaps
    tops = random.uniform(-0.1, 0.1, count) - heights / 2
    digits = [Box(*map(float, numbers)) for numbers in zip(lefts, tops, widths, heights, strict=True)]
    return digits, _place_mark(random, digits, place)


def _place_mark(random: np.random.Generator, digits: list[Box], place: str) -> Box:
    number = _bounds(digits)
    side, gap = random.uniform(0.35, 0.65), random.uniform(0.12, 0.5)
    if place in ("left of", "right of"):
        left = number.left - gap - side if place == "left of" else number.left + number.width + gap
        return Box(left, random.uniform(number.top, number.top + number.height - side), side, side)
    top = number.top - gap - side if place == "above" else number.top + number.height + gap
    return Box(random.uniform(number.left, number.left + number.width - side), top, side, side)


def _bounds(boxes: list[Box]) -> Box:
    left, top = min(box.left for box in boxes), min(box.top for box in boxes)
    right = max(box.left + box.width for box in boxes)
    bottom = max(box.top + box.height for box in boxes)
    return Box(left, top, right - left, bottom - top)


def _fit(random: np.random.Generator, digits: list[Box], mark: Box, width: int, height: int) -> tuple[list[Box], Box]:
    """Scale the layout to pixels and put it somewhere inside the picture."""
    whole = _bounds([*digits, mark])
    largest = min((width - 2 * MARGIN_PX) / whole.width, (height - 2 * MARGIN_PX) / whole.height)
    scale = min(largest, DIGIT_PX[1], max(DIGIT_PX[0], largest * random.uniform(0.6, 1.0)))
    left = random.uniform(MARGIN_PX, max(MARGIN_PX, width - MARGIN_PX - whole.width * scale))
    top = random.uniform(MARGIN_PX, max(MARGIN_PX, height - MARGIN_PX - whole.height * scale))
    placed = [
        Box(
            left + (box.left - whole.left) * scale,
            top + (box.top - whole.top) * scale,
            box.width * scale,
            box.height * scale,
        )
        for box in (*digits, mark)
    ]
    return placed[:-1], placed[-1]


def _choose_paper_and_ink(random: np.random.Generator) -> tuple[tuple[int, ...], tuple[int, ...]]:
    light = int(random.integers(195, 246)) + random.integers(-10, 11, 3)
    dark = int(random.integers(5, 80)) + random.integers(-5, 26, 3)
    paper, ink = (light, dark) if random.random() < 0.75 else (dark, light)
    return tuple(int(level) for level in paper), tuple(int(level) for level in ink)


def _draw_mark(random: np.random.Generator, picture: Image.Image, box: Box) -> tuple[str, str]:
    """Drawn four times too large and reduced, so that its edge is smooth."""
    colour = list(COLOURS)[int(random.integers(len(COLOURS)))]
    shape = SHAPES[int(random.integers(len(SHAPES)))]
    side = max(6, round(box.width))
    edge = 4 * side - 1
    mask = Image.new("L", (4 * side, 4 * side))
    pen = ImageDraw.Draw(mask)
    if shape == "circle":
        pen.ellipse((0, 0, edge, edge), fill=255)
    elif shape == "square":
        pen.rectangle((0, 0, edge, edge), fill=255)
    else:
        pen.polygon([(edge // 2, 0), (0, edge), (edge, edge)], fill=255)
    levels = np.clip(np.array(COLOURS[colour]) + random.integers(-14, 15, 3), 0, 255)
    fill = tuple(int(level) for level in levels)
    picture.paste(fill, (round(box.left), round(box.top)), mask.reduce(4))
    return colour, shape


def _add_noise(random: np.random.Generator, picture: Image.Image, style: Style) -> Image.Image:
    """Grey grain as a camera adds it, of a strength chosen per picture."""
    strength = int(random.integers(0, style.paper_noise + 1))
    if strength == 0:
        return picture
    grain = random.integers(-strength, strength + 1, (picture.height, picture.width, 1), dtype=np.int16)
    return Image.fromarray(np.clip(np.asarray(picture, np.int16) + grain, 0, 255).astype(np.uint8))
