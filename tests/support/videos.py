"""Videos made on the spot: files by PyAV, animations and lists of frames by Pillow."""

from __future__ import annotations

import base64
import io
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

FRAMES_PER_SECOND = 10


def pictures(count: int, width: int, height: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    """Frames [count, height, width, 3] in which a bar walks over a still background of coloured blocks."""
    blocks = np.random.default_rng(seed).integers(0, 200, (-(-height // 8), -(-width // 8), 3), dtype=np.uint8)
    background = blocks.repeat(8, 0).repeat(8, 1)[:height, :width]
    frames: npt.NDArray[np.uint8] = np.stack([background] * count)
    for index, frame in enumerate(frames):
        frame[:, index * 7 % width] = 255
    return frames


def _av() -> Any:
    """PyAV, where a test needs it: not every machine with a GPU has it."""
    import av

    return av


def video(
    count: int, width: int = 96, height: int = 64, seed: int = 0, *, container: str = "mp4", index_first: bool = False
) -> bytes:
    """A video file of 10 frames a second."""
    options = {"movflags": "faststart"} if index_first else {}
    with tempfile.NamedTemporaryFile() as file:  # writing the index first reads the file again by its name
        with _av().open(file.name, "w", format=container, container_options=options) as output:
            stream: Any = output.add_stream("libvpx-vp9" if container == "webm" else "mpeg4", rate=FRAMES_PER_SECOND)
            stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
            for picture in pictures(count, width, height, seed):
                output.mux(stream.encode(_av().VideoFrame.from_ndarray(picture, format="rgb24")))
            output.mux(stream.encode())
        return Path(file.name).read_bytes()


def sound() -> bytes:
    """An MP4 file without pictures."""
    file = io.BytesIO()
    with _av().open(file, "w", format="mp4") as output:
        stream: Any = output.add_stream("aac", rate=8000)
        frame = _av().AudioFrame.from_ndarray(np.zeros((1, 1024), dtype=np.float32), format="fltp", layout="mono")
        frame.sample_rate = 8000
        output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return file.getvalue()


def animation(
    count: int, width: int = 96, height: int = 64, file_format: str = "GIF", milliseconds: int = 100
) -> bytes:
    """An animated image file."""
    file = io.BytesIO()
    first, *rest = [Image.fromarray(picture) for picture in pictures(count, width, height)]
    lossless = {"lossless": True} if file_format == "WEBP" else {}
    first.save(file, file_format, save_all=True, append_images=rest, duration=milliseconds, loop=0, **lossless)
    return file.getvalue()


def frame_files(count: int, width: int = 96, height: int = 64) -> list[bytes]:
    """The frames one by one, as PNG files."""
    files = []
    for picture in pictures(count, width, height):
        file = io.BytesIO()
        Image.fromarray(picture).save(file, "PNG")
        files.append(file.getvalue())
    return files


def frame_list(files: list[bytes], fps: object = 2.0) -> bytes:
    """The frames as one element of the input `video`."""
    return json.dumps({"frames": [base64.b64encode(file).decode() for file in files], "fps": fps}).encode()
