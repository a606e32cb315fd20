"""Videos on their way into a request: files as they are, and frames that the caller chose as one JSON text.

Nothing is decoded here: the server decodes and samples, so that every entry point gives the same frames.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from deepstack_client.errors import InvalidRequestError
from deepstack_client.images import ImageSource, load_image, to_base64


@dataclass(frozen=True)
class VideoFrames:
    """A video as image files in order, `fps` of them a second. The server takes them all."""

    files: Sequence[ImageSource]
    fps: float


VideoSource = str | os.PathLike[str] | bytes | VideoFrames
"""A path (str or PathLike) or the bytes of a video file or an animated image, or frames one by one."""


def load_video(source: object) -> bytes:
    """What the input `video` takes for this source; one that holds nothing is refused."""
    if not isinstance(source, VideoFrames):
        return load_image(source, "video")
    if isinstance(source.files, str | os.PathLike | bytes):
        raise InvalidRequestError("the frames of a video must be a list")
    frames = [to_base64(load_image(file)) for file in source.files]
    return json.dumps({"frames": frames, "fps": source.fps}).encode()


def load_videos(sources: Iterable[VideoSource]) -> tuple[bytes, ...]:
    if isinstance(sources, str | os.PathLike | bytes | bytearray | memoryview | VideoFrames):
        raise InvalidRequestError("videos must be a list; wrap a single video as [video]")
    return tuple(load_video(source) for source in sources)
