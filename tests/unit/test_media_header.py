"""`probe`: size and format from the header alone, and limits that hold before a pixel is decoded."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable

import pytest
from PIL import Image

from deepstack_serving.errors import InvalidRequestError, SettingsError
from deepstack_serving.media import ImageHeader, ImageLimits, decode, probe

LIMITS = ImageLimits(max_pixels=1_000_000, max_bytes=100_000)
ORIENTATION_TAG = 0x0112


def saved(image: Image.Image, file_format: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, file_format, **options)
    return buffer.getvalue()


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png_file(width: int, height: int, pixels: bytes, behind: bytes = b"") -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", pixels) + behind + chunk(b"IEND", b"")


def tiled_tiff(side: int, tile_side: int) -> bytes:
    content = zlib.compress(bytes(tile_side * tile_side))
    long, short = 4, 3
    entries = [(256, long, side), (257, long, side), (258, short, 8), (259, short, 8), (262, short, 1), (277, short, 1)]
    start = 8 + 2 + 12 * 10 + 4
    entries += [(322, long, tile_side), (323, long, tile_side), (324, long, start), (325, long, len(content))]
    directory = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in entries)
    return b"II*\x00" + struct.pack("<IH", 8, len(entries)) + directory + bytes(4) + content


@pytest.mark.parametrize("file_format", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_tells_size_and_format(file_format: str) -> None:
    assert probe(saved(Image.new("RGB", (31, 17)), file_format), LIMITS) == ImageHeader(31, 17, file_format)


def test_a_phone_picture_of_several_frames_is_a_jpeg() -> None:
    frame = Image.new("RGB", (31, 17))
    assert probe(saved(frame, "MPO", save_all=True, append_images=[frame]), LIMITS).format == "JPEG"


@pytest.mark.parametrize("file_format", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize(("orientation", "size"), [(1, (31, 17)), (3, (31, 17)), (6, (17, 31)), (8, (17, 31))])
def test_size_is_that_of_the_picture_as_shown(file_format: str, orientation: int, size: tuple[int, int]) -> None:
    exif = Image.Exif()
    exif[ORIENTATION_TAG] = orientation
    header = probe(saved(Image.new("RGB", (31, 17)), file_format, exif=exif), LIMITS)
    assert (header.width, header.height) == size


def test_size_of_a_turned_tiff() -> None:
    header = probe(saved(Image.new("RGB", (31, 17)), "TIFF", tiffinfo={ORIENTATION_TAG: 6}), LIMITS)
    assert (header.width, header.height) == (17, 31)


def test_orientation_behind_the_pixels_of_a_png_counts() -> None:
    exif = Image.Exif()
    exif[ORIENTATION_TAG] = 6
    data = png_file(3, 2, zlib.compress(bytes(8)), chunk(b"eXIf", exif.tobytes().removeprefix(b"Exif\x00\x00")))
    assert (probe(data, LIMITS).width, decode(data, LIMITS).size) == (2, (2, 3))


def test_unreadable_orientation_means_upright() -> None:
    data = saved(Image.new("RGB", (31, 17)), "JPEG", exif=b"Exif\x00\x00no such thing")
    assert probe(data, LIMITS) == ImageHeader(31, 17, "JPEG")


def test_pixels_are_not_needed() -> None:
    assert probe(png_file(31, 17, b"no pixels"), LIMITS) == ImageHeader(31, 17, "PNG")


@pytest.mark.filterwarnings("error")  # Pillow warns of some of these sizes, which must not replace the error
@pytest.mark.parametrize("read", [probe, decode])
@pytest.mark.parametrize("side", [1_001, 12_000, 60_000])
def test_header_of_a_huge_picture_is_refused(read: Callable[[bytes, ImageLimits], object], side: int) -> None:
    with pytest.raises(InvalidRequestError, match=rf"{side * side}.*1000000|1000000.*{side * side}"):
        read(png_file(side, side, b""), LIMITS)


def test_max_pixels_is_allowed_itself() -> None:
    assert probe(png_file(1000, 1000, b""), LIMITS).width == 1000


@pytest.mark.parametrize("read", [probe, decode])
def test_small_picture_in_a_huge_tile_is_refused(read: Callable[[bytes, ImageLimits], object]) -> None:
    with pytest.raises(InvalidRequestError, match="1504x1504 pixels a tile, the limit is 1000000"):
        read(tiled_tiff(8, 1504), LIMITS)


def test_small_tile_is_read() -> None:
    assert decode(tiled_tiff(8, 16), LIMITS).size == (8, 8)


def test_longer_side_is_bounded() -> None:
    with pytest.raises(InvalidRequestError, match="31x17 pixels, the limit of a side is 30"):
        probe(saved(Image.new("RGB", (31, 17)), "PNG"), ImageLimits(1000, 1000, max_side=30))


def test_file_size_is_bounded() -> None:
    data = saved(Image.new("RGB", (31, 17)), "BMP")
    with pytest.raises(InvalidRequestError, match=rf"{len(data)} bytes, the limit is {len(data) - 1}"):
        probe(data, ImageLimits(1000, len(data) - 1))


@pytest.mark.parametrize("data", [b"", b"junk", b"%PDF-1.7", b"P6 1 1 255 abc", saved(Image.new("L", (16, 16)), "ICO")])
def test_other_formats_are_refused_with_the_served_ones(data: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="PNG, JPEG, WEBP, GIF, BMP, TIFF"):
        probe(data, LIMITS)


@pytest.mark.parametrize("size", [(0, 5), (5, 0)])
def test_picture_without_pixels_is_refused(size: tuple[int, int]) -> None:
    with pytest.raises(InvalidRequestError):
        probe(png_file(*size, b""), LIMITS)


@pytest.mark.parametrize("values", [(0, 1, None), (1, 0, None), (1, 1, 0), (178_956_971, 1, None)])
def test_impossible_limits_are_refused(values: tuple[int, int, int | None]) -> None:
    with pytest.raises(SettingsError, match="allowed is 1"):
        ImageLimits(*values)
