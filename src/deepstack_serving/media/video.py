"""Videos on their way in: a file, an animation or a list of frames, told apart here, probed and decoded to RGB frames.

`probe_video` runs at admission, `decode_video` in the vision encoder's threads. Whatever the bytes are, the outcome is
all the frames that were asked for, or an InvalidRequestError.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deepstack_serving.errors import InvalidRequestError
from deepstack_serving.media.animation import decode_animation, is_animation, probe_animation
from deepstack_serving.media.clip import VideoHeader, VideoLimits
from deepstack_serving.media.frame_list import decode_frames, is_frame_list, probe_frames
from deepstack_serving.media.video_file import decode_file, probe_file

Frames = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class _Reader:
    probe: Callable[[bytes, VideoLimits], VideoHeader]
    frames: Callable[[bytes, Collection[int], VideoLimits], Iterator[tuple[int, Frames]]]


def probe_video(data: bytes, limits: VideoLimits) -> VideoHeader:
    """What the video is, checked against the limits; no picture of a video file is decoded."""
    if len(data) > limits.max_bytes:
        raise InvalidRequestError(f"the video has {len(data)} bytes, the limit is {limits.max_bytes}")
    return _reader(data).probe(data, limits).check(limits)


def decode_video(data: bytes, header: VideoHeader, indices: Sequence[int], limits: VideoLimits) -> Frames:
    """The frames of these numbers, [len(indices), height, width, 3]. A frame that cannot be decoded is named."""
    header.check_taken(len(indices), limits)
    frames: Frames = np.empty((len(indices), header.height, header.width, 3), dtype=np.uint8)
    places = np.asarray(indices)
    missing = set(indices)
    for index, pixels in _reader(data).frames(data, frozenset(indices), limits):
        if pixels.shape != frames.shape[1:]:
            raise InvalidRequestError(
                f"frame {index} has {pixels.shape[1]}x{pixels.shape[0]} pixels, the header says {header.size}"
            )
        frames[places == index] = pixels
        missing.discard(index)
    if missing:
        raise InvalidRequestError(
            f"frame {min(missing)} of {header.frames} cannot be decoded: the video is damaged or cut short"
        )
    return frames


def _reader(data: bytes) -> _Reader:
    if is_frame_list(data):
        return _Reader(probe_frames, decode_frames)
    if is_animation(data):
        return _Reader(probe_animation, decode_animation)
    return _Reader(probe_file, decode_file)
