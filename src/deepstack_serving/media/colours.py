"""Every pixel mode that Pillow can hand out, and what becomes of it on the way to RGB.

Last step of decoding. Transparent pixels are laid on white. 16-bit gray keeps its high byte, as Pillow does with 16-bit
colour, so one picture gives the same pixels in either form. Colour profiles are not applied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from PIL import Image

from deepstack_serving.errors import InvalidRequestError

_WHITE: Final = 255
_SIXTEEN_BIT_MAX: Final = 65535


def to_rgb(image: Image.Image) -> Image.Image:
    """The loaded image in mode RGB; a mode without a defined conversion is refused by name."""
    convert = _CONVERSIONS.get(image.mode)
    if convert is None:
        raise InvalidRequestError(f"pixel mode {image.mode} is not served; served are {', '.join(_CONVERSIONS)}")
    return convert(image)


def _opaque(image: Image.Image) -> Image.Image:
    return image.convert("RGB")


def _on_white(image: Image.Image) -> Image.Image:
    rgba = image.convert("RGBA")
    result = Image.new("RGB", image.size, "white")
    result.paste(rgba, mask=rgba.getchannel("A"))
    return result


def _premultiplied_gray(image: Image.Image) -> Image.Image:
    return _on_white(image.convert("LA"))


def _on_white_if_transparent(image: Image.Image) -> Image.Image:
    return _on_white(image) if image.has_transparency_data else _opaque(image)


def _sixteen_bit_gray(image: Image.Image) -> Image.Image:
    values = np.asarray(image)
    low, high = int(values.min()), int(values.max())
    if low < 0 or high > _SIXTEEN_BIT_MAX:
        raise InvalidRequestError(f"gray values reach from {low} to {high}; served are 0 to {_SIXTEEN_BIT_MAX}")
    gray = (values >> 8).astype(np.uint8)
    transparent = image.info.get("transparency")
    if transparent is not None:
        gray[values == transparent] = _WHITE
    return Image.fromarray(gray).convert("RGB")


_CONVERSIONS: Final[dict[str, Callable[[Image.Image], Image.Image]]] = {
    "1": _on_white_if_transparent,
    "L": _on_white_if_transparent,
    "P": _on_white_if_transparent,
    "RGB": _on_white_if_transparent,
    "LA": _on_white,
    "La": _premultiplied_gray,
    "PA": _on_white,
    "RGBA": _on_white,
    "RGBa": _on_white,
    "RGBX": _opaque,
    "CMYK": _opaque,
    "YCbCr": _opaque,
    "LAB": _opaque,
    "HSV": _opaque,
    "I;16": _sixteen_bit_gray,
    "I;16L": _sixteen_bit_gray,
    "I;16B": _sixteen_bit_gray,
    "I;16N": _sixteen_bit_gray,
    "I": _sixteen_bit_gray,
}
