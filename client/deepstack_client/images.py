"""Images on their way into a request: whatever the caller holds becomes the bytes of an encoded image file.

Nothing is decoded here: the server decodes, so that every entry point gives the same pixels.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterable
from pathlib import Path

from deepstack_client.errors import InvalidRequestError

ImageSource = str | os.PathLike[str] | bytes
"""A path (str or PathLike), or the bytes of an encoded image file."""


def load_image(source: object, kind: str = "image") -> bytes:
    """The bytes of the file; a source that holds none is refused, as the `kind` of thing that it should be."""
    if isinstance(source, bytes | bytearray | memoryview):
        content, name = bytes(source), "the given bytes"
    elif isinstance(source, str | os.PathLike):
        content, name = _read_file(Path(source), kind), str(source)
    else:
        raise InvalidRequestError(f"the {kind} must be a path or bytes, not {type(source).__name__}")
    if not content:
        raise InvalidRequestError(f"{kind} is empty: {name}")
    return content


def load_images(sources: Iterable[ImageSource]) -> tuple[bytes, ...]:
    if isinstance(sources, str | os.PathLike | bytes | bytearray | memoryview):
        raise InvalidRequestError("images must be a list; wrap a single image as [image]")
    return tuple(load_image(source) for source in sources)


def to_base64(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")


def _read_file(path: Path, kind: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidRequestError(f"cannot read {kind} {path}: {error.strerror}") from error
