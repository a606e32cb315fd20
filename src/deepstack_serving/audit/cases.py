"""What an audit asks: pictures of several shapes, long prompts before short ones and these before text alone.

A buffer that keeps something of the request before shows where a shorter one, or one without pictures, follows.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepstack_serving.audit.pictures import picture_jpeg

_SHORT = "What is in the picture?"
_LONG = (
    "Look at the picture closely before you answer. Begin in the upper left corner and go on to the lower right one, "
    "row by row. Name every colour that you see, say where it is brightest, and which of its neighbours it runs into. "
    "Then say in one sentence what the whole picture could show."
)
_SIZES_PX = {
    "large picture, long prompt": (640, 480),
    "small picture, short prompt": (256, 256),
    "wide picture": (512, 96),
    "tall picture": (96, 512),
    "small picture, long prompt": (256, 224),
    "small picture, after text": (224, 256),
}


@dataclass(frozen=True)
class Case:
    """One request: encoded pictures and a question."""

    name: str
    prompt: str
    pictures: tuple[bytes, ...] = ()


def cases() -> tuple[Case, ...]:
    """In the order in which they are asked. No picture is in two of them: each is encoded in the same company."""
    one = {
        name: Case(name, _LONG if "long" in name else _SHORT, (picture_jpeg(seed, size),))
        for seed, (name, size) in enumerate(_SIZES_PX.items())
    }
    two = Case("two pictures", "What differs?", (picture_jpeg(90, (320, 240)), picture_jpeg(91, (200, 320))))
    texts = (Case("text alone, short", "What is a picture?"), Case("text alone, long", _LONG))
    large, small, wide, tall, small_long, small_after = one.values()
    return (large, small, texts[0], wide, tall, two, texts[1], small_after, small_long)


AT_ONCE = ("large picture, long prompt", "text alone, short", "two pictures", "tall picture", "text alone, long")
"""The cases that are asked again all at the same time, where packed rows of several requests share a step."""
