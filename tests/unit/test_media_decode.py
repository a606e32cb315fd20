"""`decode`: upright RGB pixels with a defined conversion for every pixel mode, alone and in threads."""

from __future__ import annotations

import io
import struct
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image, ImageOps

from deepstack_serving.errors import InvalidRequestError
from deepstack_serving.media import Decoding, ImageLimits, decode, in_batches, probe
from deepstack_serving.media.colours import to_rgb
from deepstack_serving.media.decoding import MOST_EXPECTED

LIMITS = ImageLimits(max_pixels=100_000, max_bytes=1_000_000)
ORIENTATION_TAG = 0x0112
WHITE, RED = (255, 255, 255), (255, 0, 0)


def saved(image: Image.Image, file_format: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, file_format, **options)
    return buffer.getvalue()


def pixel(data: bytes, x: int = 0) -> tuple[int, ...]:
    return tuple(np.asarray(decode(data, LIMITS))[0, x].tolist())


def noise(*shape: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(5).integers(0, 256, shape, dtype=np.uint8))


def keyed_png(depth: int, colour_type: int, row: bytes, width: int, key: bytes) -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, 1, depth, colour_type, 0, 0, 0)) + chunk(b"tRNS", key)
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\x00" + row)) + chunk(b"IEND", b"")


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("file_format", ["PNG", "TIFF", "WEBP"])
def test_picture_is_turned_as_its_tag_says(file_format: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[ORIENTATION_TAG] = orientation
    tag = {"tiffinfo": {ORIENTATION_TAG: orientation}} if file_format == "TIFF" else {"exif": exif}
    lossless = {"lossless": True} if file_format == "WEBP" else {}
    picture = noise(5, 7, 3)
    data = saved(picture, file_format, **tag, **lossless)
    picture.getexif()[ORIENTATION_TAG] = orientation
    expected = ImageOps.exif_transpose(picture)
    assert np.array_equal(np.asarray(decode(data, LIMITS)), np.asarray(expected))


@pytest.mark.parametrize("file_format", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_header_and_picture_agree(file_format: str) -> None:
    data = saved(noise(13, 29, 3), file_format)
    header, picture = probe(data, LIMITS), decode(data, LIMITS)
    assert (picture.mode, picture.size) == ("RGB", (header.width, header.height))


def test_transparent_colour_is_laid_on_white() -> None:
    assert pixel(saved(Image.new("RGBA", (1, 1), (255, 0, 0, 51)), "PNG")) == (255, 204, 204)


def test_transparent_gray_is_laid_on_white() -> None:
    assert pixel(saved(Image.new("LA", (1, 1), (0, 51)), "PNG")) == (204, 204, 204)


def test_transparent_palette_entry_is_white() -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([0, 0, 0, *RED])
    image.putpixel((1, 0), 1)
    data = saved(image, "PNG", transparency=0)
    assert (pixel(data, 0), pixel(data, 1)) == (WHITE, RED)


def test_half_transparent_palette_entry_is_blended() -> None:
    image = Image.new("P", (1, 1))
    image.putpalette([255, 0, 0])
    assert pixel(saved(image, "PNG", transparency=bytes([51]))) == (255, 204, 204)


@pytest.mark.parametrize(
    ("depth", "colour_type", "row", "key", "kept"),
    [
        (1, 0, bytes([0b01000000]), struct.pack(">H", 0), WHITE),
        (2, 0, bytes([0b01100000]), struct.pack(">H", 1), (170, 170, 170)),
        (4, 0, bytes([0x12]), struct.pack(">H", 1), (34, 34, 34)),
        (8, 0, bytes([1, 2]), struct.pack(">H", 1), (2, 2, 2)),
        (16, 0, struct.pack(">2H", 1000, 1001), struct.pack(">H", 1000), (3, 3, 3)),
        (8, 2, bytes([1, 2, 3, 1, 2, 4]), struct.pack(">3H", 1, 2, 3), (1, 2, 4)),
        (16, 2, struct.pack(">6H", 1000, 2000, 3000, 9999, 0, 0), struct.pack(">3H", 1000, 2000, 3000), (39, 0, 0)),
    ],
)
def test_colour_key_counts_in_every_depth(
    depth: int, colour_type: int, row: bytes, key: bytes, kept: tuple[int, int, int]
) -> None:
    data = keyed_png(depth, colour_type, row, 2, key)
    assert (pixel(data, 0), pixel(data, 1)) == (WHITE, kept)


@pytest.mark.parametrize("file_format", ["PNG", "TIFF"])
def test_sixteen_bit_gray_keeps_its_high_byte(file_format: str) -> None:
    values = np.array([[0, 255, 256, 32_768, 65_535]], dtype=np.uint16)
    picture = decode(saved(Image.fromarray(values), file_format), LIMITS)
    assert np.asarray(picture)[0, :, 0].tolist() == [0, 0, 1, 128, 255]


def test_gray_and_one_bit_become_equal_channels() -> None:
    assert pixel(saved(Image.new("L", (1, 1), 77), "PNG")) == (77, 77, 77)
    assert pixel(saved(Image.new("1", (1, 1), 1), "PNG")) == WHITE


def test_print_colours_become_rgb() -> None:
    assert pixel(saved(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "TIFF")) == RED


def test_lab_becomes_rgb() -> None:
    assert min(pixel(saved(Image.new("LAB", (4, 4), (255, 128, 128)), "TIFF"))) > 250


@pytest.mark.parametrize("file_format", ["GIF", "WEBP", "PNG", "TIFF"])
def test_of_an_animation_the_first_frame_counts(file_format: str) -> None:
    first, second = Image.new("RGB", (4, 4), RED), Image.new("RGB", (4, 4), "blue")
    red, _, blue = pixel(saved(first, file_format, save_all=True, append_images=[second]))
    assert red > 200
    assert blue < 50


EVERY_MODE = ["1", "L", "P", "RGB", "LA", "La", "PA", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV", "I"]
EVERY_MODE += ["I;16", "I;16L", "I;16B", "I;16N"]


@pytest.mark.parametrize("mode", EVERY_MODE)
def test_every_mode_has_a_conversion(mode: str) -> None:
    assert to_rgb(Image.new(mode, (3, 2))).mode == "RGB"


def test_modes_with_and_without_a_conversion_are_all_of_pillow() -> None:
    assert set(Image.MODES) - set(EVERY_MODE) == {"F"}


def test_mode_without_a_conversion_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequestError, match="pixel mode F is not served"):
        decode(saved(Image.new("F", (3, 2)), "TIFF"), LIMITS)


@pytest.mark.parametrize("value", [-1, 65_536])
def test_wide_gray_outside_sixteen_bits_is_refused(value: int) -> None:
    with pytest.raises(InvalidRequestError, match=rf"from {value} to {value}; served are 0 to 65535"):
        decode(saved(Image.new("I", (2, 2), value), "TIFF"), LIMITS)


def test_threads_keep_the_order_and_the_pixels() -> None:
    files = [saved(noise(11, 7 + index, 3), "PNG") for index in range(40)]
    with ThreadPoolExecutor(8) as pool:
        together = list(Decoding(pool, LIMITS, Image.Image.tobytes).each(dict(enumerate(files))))
    assert together == [(number, decode(data, LIMITS).tobytes()) for number, data in enumerate(files)]


def test_pictures_come_while_others_are_decoded() -> None:
    held = threading.Event()

    def hold_second(picture: Image.Image) -> int:
        assert picture.width == 9 or held.wait(60)
        return picture.width

    files = [saved(noise(9, width, 3), "PNG") for width in (9, 10)]
    with ThreadPoolExecutor(2) as pool:
        pictures = Decoding(pool, LIMITS, hold_second).each(dict(enumerate(files)))
        assert next(pictures) == (0, 9)
        held.set()
        assert next(pictures) == (1, 10)


def test_first_bad_file_is_named_by_its_index() -> None:
    good = saved(noise(9, 9, 3), "PNG")
    with ThreadPoolExecutor(4) as pool, pytest.raises(InvalidRequestError, match=r"^image\[1\]: .*cut short"):
        list(Decoding(pool, LIMITS, Image.Image.tobytes).each(dict(enumerate([good, good[:-60], b"junk", good]))))


def test_no_files_give_no_pictures() -> None:
    with ThreadPoolExecutor(1) as pool:
        assert list(Decoding(pool, LIMITS, Image.Image.tobytes).each({})) == []


class Seen:
    """Notes the widths of the pictures that are decoded."""

    def __init__(self) -> None:
        self.widths: list[int] = []

    def __call__(self, picture: Image.Image) -> int:
        self.widths.append(picture.width)
        return picture.width


def test_expected_files_are_decoded_once_and_before_they_are_asked_for() -> None:
    seen, first, second = Seen(), *(saved(noise(9, width, 3), "PNG") for width in (10, 11))
    with ThreadPoolExecutor(1) as pool:
        decoding = Decoding(pool, LIMITS, seen)
        decoding.expect([first, second, first])
        pool.submit(int).result()  # behind all of them
        assert seen.widths == [10, 11]
        decoding.expect([second])  # once more: it is there; the other one is dropped
        assert list(decoding.each({4: second, 7: first})) == [(4, 11), (7, 10)]
        assert seen.widths == [10, 11, 10]
        assert list(decoding.each({0: second})) == [(0, 11)]  # what was asked for is not kept
        assert seen.widths == [10, 11, 10, 11]


def test_no_more_expected_pixels_are_kept_than_one_file_may_have() -> None:
    seen, files = Seen(), [saved(noise(10, width, 3), "PNG") for width in (4, 5, 2, 1)]
    with ThreadPoolExecutor(1) as pool:
        decoding = Decoding(pool, ImageLimits(max_pixels=100, max_bytes=1 << 20), seen)
        decoding.expect(files)
        pool.submit(int).result()
    assert seen.widths == [4, 5]


def test_a_file_counts_once_and_small_ones_as_what_they_are_enlarged_to() -> None:
    seen, wide = Seen(), [saved(noise(10, width, 3), "PNG") for width in (6, 4)]
    with ThreadPoolExecutor(1) as pool:
        decoding = Decoding(pool, ImageLimits(max_pixels=100, max_bytes=1 << 20), seen)
        decoding.expect([wide[0], wide[0], wide[1]])
        pool.submit(int).result()
        assert seen.widths == [6, 4]
    many, seen = [saved(noise(1, width, 3), "PNG") for width in range(20, 90)], Seen()
    with ThreadPoolExecutor(1) as pool:
        Decoding(pool, LIMITS, seen).expect(many)
        pool.submit(int).result()
    assert len(seen.widths) == MOST_EXPECTED


def test_no_more_bytes_of_files_are_kept_than_one_may_have() -> None:
    seen, files = Seen(), [saved(noise(9, width, 3), "PNG") for width in (9, 10, 11)]
    with ThreadPoolExecutor(1) as pool:
        decoding = Decoding(pool, ImageLimits(max_pixels=10_000, max_bytes=len(files[0]) + len(files[1])), seen)
        decoding.expect(files)
        pool.submit(int).result()
    assert seen.widths == [9, 10]


def test_what_is_no_longer_expected_holds_nothing_up() -> None:
    held, begun = threading.Event(), threading.Event()
    seen: list[int] = []

    def hold_first(picture: Image.Image) -> int:
        seen.append(picture.width)
        begun.set()
        assert held.wait(60)
        return picture.width

    files = [saved(noise(9, width, 3), "PNG") for width in (9, 10, 11)]
    with ThreadPoolExecutor(1) as pool:
        decoding = Decoding(pool, LIMITS, hold_first)
        decoding.expect(files)
        assert begun.wait(60)
        decoding.forget_all_but([files[2]])
        held.set()
        assert list(decoding.each({0: files[2]})) == [(0, 11)]
    assert seen == [9, 11]


def test_bad_file_that_was_expected_is_named_by_the_call_that_asks_for_it() -> None:
    good = saved(noise(9, 9, 3), "PNG")
    with ThreadPoolExecutor(1) as pool:
        decoding = Decoding(pool, LIMITS, Image.Image.tobytes)
        decoding.expect([b"junk", good[:-60], good])
        with pytest.raises(InvalidRequestError, match=r"^image\[1\]: .*cut short"):
            list(decoding.each({0: good, 1: good[:-60]}))
        with pytest.raises(InvalidRequestError, match=r"^image\[0\]: .*cannot be read"):
            list(decoding.each({0: b"junk"}))


def test_pictures_are_taken_in_batches_of_no_more_pixels_than_one_may_have() -> None:
    files = {number: saved(noise(height, 10, 3), "PNG") for number, height in {0: 3, 2: 4, 3: 6, 5: 10, 6: 1}.items()}
    batches = in_batches(files, ImageLimits(max_pixels=100, max_bytes=1 << 20))
    assert [list(batch) for batch in batches] == [[0, 2], [3], [5], [6]]
    assert {number: data for batch in batches for number, data in batch.items()} == files


def test_picture_that_is_too_large_is_named() -> None:
    with pytest.raises(InvalidRequestError, match=r"image\[4\].*the limit is 100"):
        in_batches(
            {1: saved(noise(2, 2, 3), "PNG"), 4: saved(noise(10, 11, 3), "PNG")},
            ImageLimits(max_pixels=100, max_bytes=1 << 20),
        )
