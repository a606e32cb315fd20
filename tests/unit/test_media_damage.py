"""Damaged files of every format: a picture or an InvalidRequestError comes out, never anything else."""

from __future__ import annotations

import io
import random

import numpy as np
import pytest
from PIL import Image

from deepstack_serving.errors import InvalidRequestError
from deepstack_serving.media import ImageLimits, decode, probe

LIMITS = ImageLimits(max_pixels=200_000, max_bytes=1_000_000)
CASES_PER_FILE = 40

pytestmark = pytest.mark.filterwarnings("ignore")  # Pillow warns about the damage that these files are made of


def sample(name: str) -> bytes:
    pixels = np.random.default_rng(1).integers(0, 256, (23, 31, 4), dtype=np.uint8)
    rgba, exif = Image.fromarray(pixels), Image.Exif()
    exif[0x0112] = 6
    colour, palette = rgba.convert("RGB"), rgba.convert("RGB").quantize(16)
    files: dict[str, tuple[Image.Image, str, dict[str, object]]] = {
        "png": (rgba, "PNG", {"exif": exif}),
        "png-palette": (palette, "PNG", {"transparency": 1}),
        "jpeg": (colour, "JPEG", {"exif": exif}),
        "jpeg-progressive": (colour, "JPEG", {"progressive": True}),
        "jpeg-print": (colour.convert("CMYK"), "JPEG", {}),
        "webp": (rgba, "WEBP", {"exif": exif}),
        "webp-lossless": (rgba, "WEBP", {"lossless": True}),
        "gif": (palette, "GIF", {}),
        "gif-animated": (palette, "GIF", {"save_all": True, "append_images": [palette.rotate(90)]}),
        "bmp": (colour, "BMP", {}),
        "tiff": (colour, "TIFF", {"tiffinfo": {0x0112: 6}}),
        "tiff-lzw": (colour, "TIFF", {"compression": "tiff_lzw"}),
        "tiff-jpeg": (colour, "TIFF", {"compression": "jpeg"}),
    }
    image, file_format, options = files[name]
    buffer = io.BytesIO()
    image.save(buffer, file_format, **options)
    return buffer.getvalue()


STILL = ["png", "png-palette", "jpeg", "jpeg-progressive", "jpeg-print", "webp", "webp-lossless", "gif", "bmp"]
STILL += ["tiff", "tiff-lzw", "tiff-jpeg"]


def damaged(data: bytes, chance: random.Random) -> bytes:
    broken, kind = bytearray(data), chance.randrange(3)
    if kind == 0:
        return bytes(broken[: chance.randrange(len(broken))])
    reach = len(broken) if kind == 1 else min(len(broken), 120)
    for _ in range(chance.randrange(1, 5)):
        broken[chance.randrange(reach)] = chance.choice([0, 1, 127, 128, 255, chance.randrange(256)])
    return bytes(broken)


def outcome(data: bytes) -> str:
    try:
        header = probe(data, LIMITS)
        picture = decode(data, LIMITS)
    except InvalidRequestError:
        return "refused"
    return "read" if picture.size == (header.width, header.height) else "sizes differ"


@pytest.mark.parametrize("name", [*STILL, "gif-animated"])
def test_damaged_file_is_read_or_refused(name: str) -> None:
    data, chance = sample(name), random.Random(name)
    outcomes = {outcome(damaged(data, chance)) for _ in range(CASES_PER_FILE)}
    assert outcomes <= {"read", "refused"}


@pytest.mark.parametrize("name", STILL)
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_file_cut_short_is_refused(name: str, share: float) -> None:
    data = sample(name)
    with pytest.raises(InvalidRequestError):
        decode(data[: int(len(data) * share)], LIMITS)
