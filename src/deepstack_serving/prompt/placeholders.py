"""Expand image placeholders: the one placeholder token of each image becomes as many as the image has feature rows.

A video's placeholder was replaced before tokenising, because the text that takes its place is the model family's; its
tokens are only counted here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deepstack_serving.errors import InvalidRequestError
from deepstack_serving.families.base import Int64Array


@dataclass(frozen=True)
class Prompt:
    """Token ids [tokens] with placeholders expanded, and the rows [image tokens] that features belong to, in order.

    Image tokens are those of images and videos. `feature_rows` [image tokens] says which row of the encoder's features
    belongs to each: the encoder sends the images' rows first, then the videos'.
    """

    input_ids: Int64Array
    image_rows: Int64Array
    feature_rows: Int64Array
    image_tokens: tuple[int, ...]
    video_tokens: tuple[int, ...] = ()

    @property
    def length(self) -> int:
        return len(self.input_ids)


def text_positions(prompt: Prompt, axes: int) -> Int64Array:
    """Rotary positions [axes, tokens] of a prompt without images: all axes count the tokens."""
    return np.broadcast_to(np.arange(prompt.length), (axes, prompt.length))


def expand_placeholders(
    token_ids: Sequence[int],
    image_token_id: int,
    image_tokens: Sequence[int],
    may_touch: bool = False,
    video_token_id: int | None = None,
    video_tokens: Sequence[int] = (),
) -> Prompt:
    """Raises InvalidRequestError when placeholders and images are not the same number, or touch and may not."""
    ids = np.asarray(token_ids, dtype=np.int64)
    places = np.flatnonzero(ids == image_token_id)
    if len(places) != len(image_tokens):
        raise InvalidRequestError(
            f"the prompt has {len(places)} image placeholders for {len(image_tokens)} images; send as many as it has"
        )
    if len(ids) == 0:
        raise InvalidRequestError("the prompt is empty")
    if not may_touch and bool((np.diff(places) == 1).any()):
        raise InvalidRequestError("two image placeholders touch each other; put text or the end-of-image token between")
    repeats = np.ones(len(ids), dtype=np.int64)
    repeats[places] = image_tokens
    expanded = np.repeat(ids, repeats)
    is_image, is_video = expanded == image_token_id, _video_rows(expanded, video_token_id, sum(video_tokens))
    rows = np.flatnonzero(is_image | is_video)
    features = np.where(is_video, is_image.sum() + np.cumsum(is_video), np.cumsum(is_image))[rows] - 1
    return Prompt(expanded, rows, features, tuple(image_tokens), tuple(video_tokens))


def _video_rows(ids: Int64Array, video_token_id: int | None, expected: int) -> npt.NDArray[np.bool_]:
    is_video = np.zeros(len(ids), dtype=np.bool_) if video_token_id is None else ids == video_token_id
    if is_video.sum() != expected:
        raise InvalidRequestError(f"the prompt has {is_video.sum()} video tokens, its videos take {expected}")
    return is_video
