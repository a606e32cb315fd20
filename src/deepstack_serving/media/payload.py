"""One element of the `image` or `video` input: raw file bytes or base64 text, told apart here and nowhere else.

First step of a file's path, at admission. A known signature of an image always means raw bytes, because no base64 text
of an image begins with one; anything else has to be strict base64. Videos have too many signatures: what does not begin
as text does is a file. An address is refused: nothing is ever fetched.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from deepstack_serving.errors import InvalidRequestError

Result = TypeVar("Result")

_SIGNATURES = re.compile(
    rb"\x89PNG\r\n\x1a\n|\xff\xd8\xff|RIFF....WEBP|GIF8[79]a|BM|II[*+]\x00|MM\x00[*+]",
    re.DOTALL,
)
_DATA_ADDRESS = re.compile(rb"data:(?P<kind>[^,;]*)(?P<parameters>[^,]*),", re.IGNORECASE)
_ADDRESS = re.compile(rb"(?P<scheme>[a-z][a-z0-9+.-]{0,31}):", re.IGNORECASE)
_WHITESPACE = b" \t\r\n"
_TEXT_HEAD = re.compile(rb"[A-Za-z0-9+/=:;,.\s_-]{1,64}")


def raw_bytes(value: bytes) -> bytes:
    """The bytes of the image file that `value` carries; no look inside the file beyond its signature."""
    return value if _SIGNATURES.match(value) else _from_text(value, "image")


def raw_video(value: bytes) -> bytes:
    """The bytes of the video file that `value` carries, or the JSON text of a list of frames as it is."""
    is_text = _TEXT_HEAD.fullmatch(value[:64]) or not value
    return _from_text(value, "video") if is_text else value


def read_each(kind: str, payloads: Sequence[bytes], read: Callable[[bytes], Result]) -> list[Result]:
    """What `read` makes of each; its InvalidRequestError then names the element, as in `image[1]`."""
    results = []
    for index, payload in enumerate(payloads):
        try:
            results.append(read(payload))
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{kind}[{index}]: {error}") from error
    return results


def _from_text(value: bytes, kind: str) -> bytes:
    text = value.strip(_WHITESPACE)
    if not text:
        raise InvalidRequestError(f"the {kind} is empty: {_expected(kind)}")
    data_address = _DATA_ADDRESS.match(text)
    if data_address:
        _check_data_address(data_address, kind)
        text = text[data_address.end() :]
    elif address := _ADDRESS.match(text):
        scheme = address["scheme"].decode().lower()
        raise InvalidRequestError(
            f"{kind}s are sent as file bytes or base64, URLs are never fetched; got one that begins with '{scheme}:'"
        )
    return _decoded_base64(text, kind)


def _expected(kind: str) -> str:
    article = "an" if kind == "image" else "a"
    return f"expected the bytes of {article} {kind} file, base64 text or a data:{kind}/...;base64, text"


def _check_data_address(address: re.Match[bytes], kind: str) -> None:
    media_type, parameters = address["kind"].lower(), address["parameters"].lower()
    # An animated image may be sent as a video.
    known = media_type.startswith(b"image/") or (kind == "video" and media_type.startswith(b"video/"))
    if not known or not parameters.endswith(b";base64"):
        raise InvalidRequestError(f"the {kind} begins with {address[0][:60]!r}: {_expected(kind)}")


def _decoded_base64(text: bytes, kind: str) -> bytes:
    compact = text.translate(None, _WHITESPACE)
    try:
        data = binascii.a2b_base64(compact, strict_mode=True)
        if len(compact) != -(-len(data) // 3) * 4:  # the strict mode still takes padding that follows a full group
            raise binascii.Error("padding that belongs to nothing")
    except binascii.Error as error:
        raise InvalidRequestError(
            f"the {kind} begins with {text[:16]!r}, which is no known {kind} file and not base64 ({error}): "
            f"{_expected(kind)}"
        ) from error
    if not data:
        raise InvalidRequestError(f"the {kind} is empty: {_expected(kind)}")
    return data
