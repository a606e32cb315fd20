"""A video as a list of image files: JSON text `{"frames": ["<base64>", ...], "fps": 2.0}`.

Whoever sends frames has chosen them, so all are taken; `fps` says how far apart they are and gives their timestamps.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from deepstack_serving.errors import InvalidRequestError, shown
from deepstack_serving.media.clip import FPS, VideoHeader, VideoLimits
from deepstack_serving.media.image_file import decode, probe
from deepstack_serving.media.payload import raw_bytes

_KEYS = {"frames", "fps"}


def is_frame_list(data: bytes) -> bool:
    """Whether this is JSON; no video file begins with a brace."""
    return data.lstrip()[:1] == b"{"


def frame_list(frames: Sequence[str], fps: object) -> bytes:
    """The JSON text for base64 texts of image files."""
    return json.dumps({"frames": list(frames), "fps": fps}).encode()


def probe_frames(data: bytes, limits: VideoLimits) -> VideoHeader:
    """Every frame's header is read. Raises InvalidRequestError naming the frame."""
    files, fps = _parse(data, limits)
    sizes = []
    for index, file in enumerate(files):
        try:
            header = probe(raw_bytes(file), limits.frame)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"frame {index}: {error}") from error
        sizes.append((header.width, header.height))
    for index, size in enumerate(sizes):
        if size != sizes[0]:
            raise InvalidRequestError(
                f"frame {index} has {size[0]}x{size[1]} pixels, frame 0 has {sizes[0][0]}x{sizes[0][1]}: the frames of "
                "a video are of one size"
            )
    return VideoHeader(len(files), fps, *sizes[0], chosen=True)


def decode_frames(
    data: bytes, wanted: Collection[int], limits: VideoLimits
) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
    """The wanted frames in order, each [height, width, 3]."""
    files, _ = _parse(data, limits)
    for index in sorted(wanted):
        try:
            yield index, np.asarray(decode(raw_bytes(files[index]), limits.frame))
        except InvalidRequestError as error:
            raise InvalidRequestError(f"frame {index}: {error}") from error


def _parse(data: bytes, limits: VideoLimits) -> tuple[list[bytes], float]:
    try:
        content: Any = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the video begins with a brace and is not JSON: {error}") from error
    if not isinstance(content, dict) or content.keys() != _KEYS:
        raise InvalidRequestError("a video as a list of frames is JSON with exactly the keys 'frames' and 'fps'")
    frames = content["frames"]
    if not isinstance(frames, list) or not frames or not all(isinstance(frame, str) for frame in frames):
        raise InvalidRequestError("'frames' must be a list of at least one image file as base64 text")
    if len(frames) > limits.max_frames:
        raise InvalidRequestError(f"the video has {len(frames)} frames, the limit is {limits.max_frames}")
    try:
        return [frame.encode("utf-8", "surrogatepass") for frame in frames], float(FPS.parse(content["fps"]))
    except ValueError as error:
        raise InvalidRequestError(f"'fps' of the frames is {shown(content['fps'])}; allowed: {FPS.allowed}") from error
