"""Video files by PyAV, which carries FFmpeg. Frames are counted by their packets, and decoded from the first on.

Only formats that hold their own data are opened: playlists would have FFmpeg fetch what they name.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from deepstack_serving.errors import InvalidRequestError
from deepstack_serving.media.clip import VideoHeader, VideoLimits

FORMATS = ("mov", "mp4", "matroska", "webm", "avi", "mpegts", "mpeg", "flv", "ogg")


def probe_file(data: bytes, limits: VideoLimits) -> VideoHeader:
    """Frames, mean rate and size of the first video stream; no picture is decoded."""
    with _stream(data, limits) as (container, stream):
        rate = stream.average_rate or stream.guessed_rate
        if not rate:
            raise InvalidRequestError("the video file does not say how many frames it shows a second")
        packets = shown = 0
        for packet in container.demux(stream):
            packets += packet.size > 0
            shown += packet.size > 0 and not packet.is_discard
            if shown > limits.max_frames:
                break
        if packets < stream.frames and shown <= limits.max_frames:
            raise InvalidRequestError(f"the video file is cut short: it holds {packets} of its {stream.frames} frames")
        return VideoHeader(shown, float(rate), stream.width, stream.height)


def decode_file(
    data: bytes, wanted: Collection[int], limits: VideoLimits
) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
    """The wanted frames in order, each [height, width, 3]; fewer when the file ends or breaks before."""
    with _stream(data, limits) as (container, stream):
        last = max(wanted)
        for index, frame in enumerate(container.decode(stream)):
            if index in wanted:
                yield index, frame.to_ndarray(format="rgb24")
            if index == last:
                return


@contextmanager
def _stream(data: bytes, limits: VideoLimits) -> Iterator[tuple[Any, Any]]:
    av = _library()
    options = {"format_whitelist": ",".join(FORMATS), "protocol_whitelist": "none"}
    try:
        with av.open(io.BytesIO(data), options=options, metadata_errors="ignore") as container:
            if not container.streams.video:
                raise InvalidRequestError("the file holds no video stream")
            stream = container.streams.video[0]
            if stream.codec_context is None:
                raise InvalidRequestError("the video stream's codec is unknown or has no decoder")
            # The header's size was checked; this holds for what the stream itself says later.
            stream.codec_context.options = {"max_pixels": str(limits.frame.max_pixels)}
            yield container, stream
    except (av.FFmpegError, IndexError) as error:  # PyAV meets streams that it did not list in damaged files
        raise InvalidRequestError(
            f"the video file ({len(data)} bytes, beginning with {data[:16]!r}) cannot be read as {', '.join(FORMATS)}: "
            f"it is of another kind, damaged or cut short ({getattr(error, 'strerror', error)})"
        ) from error


def _library() -> Any:
    """PyAV is an extra: without it GIF, WebP and lists of frames are still served."""
    try:
        import av
    except ImportError as error:
        raise InvalidRequestError(
            "this server cannot read video files: the package 'av' is not installed there (deepstack-serving[video])"
        ) from error
    return av
