"""Two facts of a PNG file that Pillow leaves out or leaves raw: metadata behind the pixels, and the colour key.

Used while a PNG file is opened and decoded; every function expects a file that Pillow has accepted as PNG.
"""

from __future__ import annotations

import struct
from typing import Final

from PIL import Image

_SIGNATURE_BYTES: Final = 8
_DEPTH_AT: Final = 24


def exif_block(data: bytes) -> bytes | None:
    """The eXIf chunk, wherever it stands: it may follow the pixels, and opening a file stops before them."""
    position = _SIGNATURE_BYTES
    while position + 8 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, position)
        if kind == b"eXIf":
            return b"Exif\x00\x00" + data[position + 8 : position + 8 + length]
        position += length + 12
    return None


def rescale_colour_key(image: Image.Image, data: bytes) -> None:
    """Bring the transparent colour, which the file states in its own bit depth, to the depth of the loaded pixels."""
    key, depth = image.info.get("transparency"), data[_DEPTH_AT]
    if image.mode == "L" and isinstance(key, int) and depth < 8:
        image.info["transparency"] = key * 255 // (2**depth - 1)
    elif image.mode == "RGB" and isinstance(key, tuple) and depth == 16:
        image.info["transparency"] = tuple(value >> 8 for value in key)
