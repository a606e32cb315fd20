"""The `image` input: raw file bytes or base64 text, nothing else, and never an address."""

from __future__ import annotations

import base64
import io

import pytest
from PIL import Image

from deepstack_serving.errors import InvalidRequestError
from deepstack_serving.media import raw_bytes

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")


def image_file(file_format: str) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (5, 4), "red").save(buffer, file_format)
    return buffer.getvalue()


@pytest.mark.parametrize("file_format", FORMATS)
def test_file_bytes_pass_unchanged(file_format: str) -> None:
    data = image_file(file_format)
    assert raw_bytes(data) == data


@pytest.mark.parametrize("file_format", FORMATS)
def test_base64_text_gives_the_file(file_format: str) -> None:
    data = image_file(file_format)
    assert raw_bytes(base64.b64encode(data)) == data


def test_base64_may_be_wrapped_in_lines() -> None:
    data = image_file("PNG")
    wrapped = base64.encodebytes(data).replace(b"\n", b"\r\n")
    assert raw_bytes(b"  " + wrapped + b"\t\n") == data


@pytest.mark.parametrize("head", [b"data:image/png;base64,", b"DATA:image/x-any;name=a.png;BASE64,"])
def test_data_address_gives_the_file(head: bytes) -> None:
    data = image_file("PNG")
    assert raw_bytes(head + base64.b64encode(data)) == data


@pytest.mark.parametrize("scheme", ["http", "https", "file", "ftp", "HTTP", "s3"])
def test_address_is_never_fetched(scheme: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"URLs are never fetched.*'{scheme.lower()}:'"):
        raw_bytes(f" {scheme}://169.254.169.254/latest".encode())


def test_address_is_not_repeated_in_the_error() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        raw_bytes(b"https://user:secret@host/picture.png")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("value", [b"", b" \r\n", b"data:image/png;base64,"])
def test_nothing_is_refused(value: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="empty"):
        raw_bytes(value)


@pytest.mark.parametrize(
    "value",
    [
        b"%PDF-1.7\n",
        b"/9j_-w==",
        b"AAAAA",
        b"AA==AAAA",
        b"AAAA=",
        b"\x00\x01\x02\x03",
        b"data:image/png,AAAA",
        b"data:text/plain;base64,AAAA",
    ],
    ids=["other-file", "url-alphabet", "no-padding", "padding-inside", "excess", "junk", "not-base64", "no-image"],
)
def test_anything_else_is_refused_with_what_was_expected(value: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="expected the bytes of an image file, base64 text"):
        raw_bytes(value)
