"""Pictures that no two requests share: made from a seed, so that a run can be repeated pixel by pixel."""

from __future__ import annotations

from deepstack_serving.audit.pictures import picture_jpeg

SIZES_PX = ((256, 256), (320, 240), (384, 384), (512, 384))
QUESTIONS = (
    "What is in the picture?",
    "Describe the colours of this picture.",
    "Which number is written here?",
    "Where is the coloured mark?",
)


def pictures(count: int, first_seed: int, sizes_px: tuple[tuple[int, int], ...] = SIZES_PX) -> list[bytes]:
    """`count` different pictures, their sizes in turn."""
    return [picture_jpeg(first_seed + index, sizes_px[index % len(sizes_px)]) for index in range(count)]


def questions(count: int) -> list[str]:
    """`count` questions in turn, so that neighbours differ in text and length."""
    return [QUESTIONS[index % len(QUESTIONS)] for index in range(count)]
