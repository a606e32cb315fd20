"""Pictures made from a seed, so that a run can be repeated pixel by pixel."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

_COARSE = 8


def picture_jpeg(seed: int, size_px: tuple[int, int]) -> bytes:
    """A JPEG file of soft coloured spots with some grain; `size_px` is (width, height)."""
    random = np.random.default_rng(seed)
    spots = random.integers(0, 256, (_COARSE, _COARSE, 3), dtype=np.uint8)
    soft = np.asarray(Image.fromarray(spots).resize(size_px, Image.Resampling.BICUBIC), dtype=np.int16)
    grain = random.integers(-12, 13, soft.shape, dtype=np.int16)
    file = io.BytesIO()
    Image.fromarray(np.clip(soft + grain, 0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
    return file.getvalue()
