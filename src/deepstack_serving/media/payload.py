"""One element of the `image` input: raw file bytes or base64 text, told apart here and nowhere else.

First step of an image's path, at admission. A known file signature always means raw bytes, because no base64 text of an
image begins with one; anything else has to be strict base64. An address is refused: nothing is ever fetched.
"""

from __future__ import annotations

import binascii
import re

from deepstack_serving.errors import InvalidRequestError

_EXPECTED = "expected the bytes of an image file, base64 text or a data:image/...;base64, text"
_SIGNATURES = re.compile(
    rb"\x89PNG\r\n\x1a\n|\xff\xd8\xff|RIFF....WEBP|GIF8[79]a|BM|II[*+]\x00|MM\x00[*+]",
    re.DOTALL,
)
_DATA_ADDRESS = re.compile(rb"data:(?P<kind>[^,;]*)(?P<parameters>[^,]*),", re.IGNORECASE)
_ADDRESS = re.compile(rb"(?P<scheme>[a-z][a-z0-9+.-]{0,31}):", re.IGNORECASE)
_WHITESPACE = b" \t\r\n"


def raw_bytes(value: bytes) -> bytes:
    """The bytes of the image file that `value` carries; no look inside the file beyond its signature."""
    if _SIGNATURES.match(value):
        return value
    text = value.strip(_WHITESPACE)
    if not text:
        raise InvalidRequestError(f"the image is empty: {_EXPECTED}")
    data_address = _DATA_ADDRESS.match(text)
    if data_address:
        _check_data_address(data_address)
        text = text[data_address.end() :]
    elif address := _ADDRESS.match(text):
        scheme = address["scheme"].decode().lower()
        raise InvalidRequestError(
            f"images are sent as file bytes or base64, URLs are never fetched; got one that begins with '{scheme}:'"
        )
    return _decoded_base64(text)


def _check_data_address(address: re.Match[bytes]) -> None:
    kind, parameters = address["kind"].lower(), address["parameters"].lower()
    if not kind.startswith(b"image/") or not parameters.endswith(b";base64"):
        raise InvalidRequestError(f"the image begins with {address[0][:60]!r}: {_EXPECTED}")


def _decoded_base64(text: bytes) -> bytes:
    compact = text.translate(None, _WHITESPACE)
    try:
        data = binascii.a2b_base64(compact, strict_mode=True)
        if len(compact) != -(-len(data) // 3) * 4:  # the strict mode still takes padding that follows a full group
            raise binascii.Error("padding that belongs to nothing")
    except binascii.Error as error:
        raise InvalidRequestError(
            f"the image begins with {text[:16]!r}, which is no known image file and not base64 ({error}): {_EXPECTED}"
        ) from error
    if not data:
        raise InvalidRequestError(f"the image is empty: {_EXPECTED}")
    return data
