"""How long an animated file plays, from its frames' headers: Pillow would have to decode every frame to say it."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from fractions import Fraction

_GIF_HEADER, _GIF_TABLE, _GIF_EXTENSION, _GIF_IMAGE, _GIF_CONTROL = 13, 0x80, 0x21, 0x2C, 0xF9


def play_seconds(data: bytes) -> Fraction:
    """Of a GIF, WebP or PNG file, all its frames together; 0 where no frame says it. What is cut off counts as 0."""
    frames = _gif if data.startswith(b"GIF") else _png if data.startswith(b"\x89PNG") else _webp
    try:
        return sum(frames(data), Fraction(0))
    except (IndexError, struct.error):
        return Fraction(0)


def _gif(data: bytes) -> Iterator[Fraction]:
    position = _GIF_HEADER + _table_bytes(data[10])
    while data[position] in (_GIF_EXTENSION, _GIF_IMAGE):
        if data[position] == _GIF_IMAGE:
            position += 11 + _table_bytes(data[position + 9])
        else:
            if data[position + 1] == _GIF_CONTROL:
                yield Fraction(int.from_bytes(data[position + 4 : position + 6], "little"), 100)
            position += 2
        while data[position]:
            position += data[position] + 1
        position += 1


def _table_bytes(flags: int) -> int:
    return 3 << (flags & 7) + 1 if flags & _GIF_TABLE else 0


def _webp(data: bytes) -> Iterator[Fraction]:
    position = 12
    while position + 8 <= len(data):
        kind, size = struct.unpack_from("<4sI", data, position)
        if kind == b"ANMF":
            yield Fraction(int.from_bytes(data[position + 20 : position + 23], "little"), 1000)
        position += 8 + size + size % 2


def _png(data: bytes) -> Iterator[Fraction]:
    position = 8
    while position + 8 <= len(data):
        size, kind = struct.unpack_from(">I4s", data, position)
        if kind == b"fcTL":
            numerator, denominator = struct.unpack_from(">HH", data, position + 28)
            yield Fraction(numerator, denominator or 100)
        position += size + 12
