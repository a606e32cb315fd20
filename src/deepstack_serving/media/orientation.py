"""Which way up an image file is to be shown, known from its metadata before any pixel is decoded.

Used by `probe` (which sides change places) and `decode` (how to turn the pixels), so that both always agree.
"""

from __future__ import annotations

import struct
from typing import Final

from PIL import Image, ImageFile

from deepstack_serving.media import png

UPRIGHT: Final = 1
_ORIENTATION_TAG: Final = 0x0112
_TURNS: Final = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_UNREADABLE: Final = (SyntaxError, ValueError, TypeError, KeyError, IndexError, EOFError, OSError, struct.error)


def orientation_of(image: ImageFile.ImageFile, data: bytes) -> int:
    """The orientation, 1 to 8, of an opened and unloaded file. A missing, unreadable or unknown tag means upright."""
    if image.format == "PNG" and "exif" not in image.info and (block := png.exif_block(data)):
        image.info["exif"] = block
    try:
        # The base class's method: the PNG class would decode the whole picture to look for metadata behind it.
        value = Image.Image.getexif(image).get(_ORIENTATION_TAG)
    except _UNREADABLE:
        return UPRIGHT
    return value if isinstance(value, int) and value in _TURNS else UPRIGHT


def swaps_sides(orientation: int) -> bool:
    """Whether width and height change places when the pixels are turned."""
    return orientation >= 5


def turned(image: Image.Image, orientation: int) -> Image.Image:
    """The pixels as they are to be shown."""
    return image if orientation == UPRIGHT else image.transpose(_TURNS[orientation])
