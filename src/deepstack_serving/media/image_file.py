"""Image files: the header checked before anything is decoded, then the whole picture as upright RGB pixels.

`probe` runs at admission, `decode` in the vision encoder's threads. Whatever the bytes are, the outcome is a
picture or an InvalidRequestError.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from PIL import Image, ImageFile, TiffImagePlugin, UnidentifiedImageError

from deepstack_serving.errors import InvalidRequestError, SettingsError
from deepstack_serving.media import png
from deepstack_serving.media.colours import to_rgb
from deepstack_serving.media.orientation import UPRIGHT, orientation_of, swaps_sides, turned

FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
LARGEST_MAX_PIXELS: Final = 178_956_970  # Pillow itself refuses anything larger
_TILE_SIDE_TAGS: Final = (322, 323)
# Everything that Pillow's readers were seen to raise on damaged files.
_JUNK: Final = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    EOFError,
    struct.error,
    zlib.error,
)


@dataclass(frozen=True)
class ImageLimits:
    """What one image file may be at most. `max_side` bounds the longer side."""

    max_pixels: int
    max_bytes: int
    max_side: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.max_pixels <= LARGEST_MAX_PIXELS:
            raise SettingsError(f"max_pixels is {self.max_pixels}; allowed is 1 to {LARGEST_MAX_PIXELS}")
        for name, value in (("max_bytes", self.max_bytes), ("max_side", self.max_side)):
            if value is not None and value < 1:
                raise SettingsError(f"{name} is {value}; allowed is 1 or more")


@dataclass(frozen=True)
class ImageHeader:
    """Size in pixels as the picture is shown, so after its orientation tag; format is one of FORMATS."""

    width: int
    height: int
    format: str

    @property
    def pixels(self) -> int:
        return self.width * self.height


def probe(data: bytes, limits: ImageLimits) -> ImageHeader:
    """Size and format from the file's header, checked against the limits; no pixel is decoded."""
    with opened(data, limits) as image:
        return _checked_header(image, orientation_of(image, data), limits)


def decode(data: bytes, limits: ImageLimits) -> Image.Image:
    """The whole picture, upright, in mode RGB, of the size that `probe` tells. Of an animation, the first frame."""
    with opened(data, limits) as image:
        orientation = orientation_of(image, data)
        header = _checked_header(image, orientation, limits)
        image.load()
        if header.format == "PNG":
            png.rescale_colour_key(image, data)
        # Pillow turns a TIFF itself while loading it.
        picture = turned(to_rgb(image), UPRIGHT if header.format == "TIFF" else orientation)
    if picture.size != (header.width, header.height):
        raise InvalidRequestError(
            f"the header says {header.width}x{header.height} pixels, the picture has {picture.width}x{picture.height}"
        )
    return picture


def in_batches(files: Mapping[int, bytes], limits: ImageLimits) -> list[dict[int, bytes]]:
    """Files by their number in the request, as many at a time as have no more pixels together than one may have.

    Small files unpack to large pictures, and a request may hold many: only one batch of them is to be in memory.
    """
    batches: list[dict[int, bytes]] = []
    room = 0
    for number, data in files.items():
        with naming(number):
            pixels = probe(data, limits).pixels
        if not batches or pixels > room:
            batches.append({})
            room = limits.max_pixels
        batches[-1][number] = data
        room -= pixels
    return batches


@contextmanager
def naming(number: int) -> Iterator[None]:
    """An InvalidRequestError from inside says which image of the request it is about."""
    try:
        yield
    except InvalidRequestError as error:
        raise InvalidRequestError(f"image[{number}]: {error}") from error


@contextmanager
def opened(data: bytes, limits: ImageLimits) -> Iterator[ImageFile.ImageFile]:
    """The file, its header read; whatever Pillow raises inside the context becomes an InvalidRequestError."""
    if len(data) > limits.max_bytes:
        raise InvalidRequestError(f"the image file has {len(data)} bytes, the limit is {limits.max_bytes}")
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            yield image
    except UnidentifiedImageError as error:
        raise InvalidRequestError(
            f"the image file ({len(data)} bytes, beginning with {data[:16]!r}) cannot be read as {', '.join(FORMATS)}"
        ) from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise InvalidRequestError(f"the image has more than {limits.max_pixels} pixels, the limit: {error}") from error
    except _JUNK as error:
        raise InvalidRequestError(
            f"the image file ({len(data)} bytes) is damaged or cut short: {type(error).__name__}: {error}"
        ) from error


def _checked_header(image: ImageFile.ImageFile, orientation: int, limits: ImageLimits) -> ImageHeader:
    width, height = _stored_size(image)
    if swaps_sides(orientation):
        width, height = height, width
    size = f"the image has {width}x{height} pixels"
    if width * height < 1:
        raise InvalidRequestError(f"{size}, which is no picture")
    if width * height > limits.max_pixels:
        raise InvalidRequestError(f"{size} = {width * height}, the limit is {limits.max_pixels}")
    _check_tile(image, limits)
    if limits.max_side is not None and max(width, height) > limits.max_side:
        raise InvalidRequestError(f"{size}, the limit of a side is {limits.max_side}")
    return ImageHeader(width, height, _format_name(image))


def _stored_size(image: ImageFile.ImageFile) -> tuple[int, int]:
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        # Whether `size` is already that of the turned picture depends on Pillow's version.
        return image.tag_v2[TiffImagePlugin.IMAGEWIDTH], image.tag_v2[TiffImagePlugin.IMAGELENGTH]
    return image.size


def _check_tile(image: ImageFile.ImageFile, limits: ImageLimits) -> None:
    # A tile is decoded whole, however little of it the picture shows: an 8x8 picture can unpack gigabytes.
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        width, height = (image.tag_v2.get(tag, 1) for tag in _TILE_SIDE_TAGS)
        if width * height > limits.max_pixels:
            raise InvalidRequestError(f"the image has {width}x{height} pixels a tile, the limit is {limits.max_pixels}")


def _format_name(image: ImageFile.ImageFile) -> str:
    return "JPEG" if image.format == "MPO" else str(image.format)
