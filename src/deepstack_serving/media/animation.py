"""Animated GIF, WebP and PNG files as videos, by Pillow. Each frame is shown over white, as a still image is."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from deepstack_serving.media.clip import VideoHeader, VideoLimits
from deepstack_serving.media.colours import to_rgb
from deepstack_serving.media.durations import play_seconds
from deepstack_serving.media.image_file import ImageLimits, opened

_SIGNATURES = re.compile(rb"GIF8[79]a|RIFF....WEBP|\x89PNG\r\n\x1a\n", re.DOTALL)
_USUAL_RATE = 10.0  # at which a file plays that does not say how long its frames are shown


def is_animation(data: bytes) -> bool:
    """Whether this is a file of a format whose animations Pillow reads."""
    return _SIGNATURES.match(data) is not None


def probe_animation(data: bytes, limits: VideoLimits) -> VideoHeader:
    """Frames may be shown for different times; the rate is the mean. No frame after the first is decoded."""
    with opened(data, _file_limits(limits)) as image:
        frames, seconds = getattr(image, "n_frames", 1), play_seconds(data)
        return VideoHeader(frames, float(frames / seconds) if seconds else _USUAL_RATE, *image.size)


def decode_animation(
    data: bytes, wanted: Collection[int], limits: VideoLimits
) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
    """The wanted frames in order, each [height, width, 3]."""
    with opened(data, _file_limits(limits)) as image:
        for index in sorted(wanted):
            image.seek(index)
            image.load()
            yield index, np.asarray(to_rgb(image.copy()))


def _file_limits(limits: VideoLimits) -> ImageLimits:
    return replace(limits.frame, max_bytes=limits.max_bytes)
