"""A call to the vision encoder: the files of a request as tensors, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from deepstack_serving.errors import WireError
from deepstack_serving.media import FPS, FRAME_COUNT, MediaFiles, VideoSampling
from deepstack_serving.wire import COMING_IMAGES, IMAGE, VIDEO, VIDEO_SAMPLING


def media_tensors(files: MediaFiles) -> dict[str, npt.NDArray[Any]]:
    """The input tensors of the call; those of videos and of coming images only where there are some."""
    tensors = {IMAGE.name: _bytes(files.images)}
    if files.coming:
        tensors[COMING_IMAGES.name] = _bytes(files.coming)
    if files.videos:
        sampling = files.sampling
        values = [sampling.frames_per_second or 0, sampling.frame_count or 0]
        tensors |= {VIDEO.name: _bytes(files.videos), VIDEO_SAMPLING.name: np.array(values, dtype=np.float32)}
    return tensors


def media_files(inputs: Mapping[str, Any]) -> MediaFiles:
    """From a call's inputs: lists of bytes, and the sampling as a tensor. Raises WireError."""
    images, videos, coming = (tuple(inputs.get(spec.name, ())) for spec in (IMAGE, VIDEO, COMING_IMAGES))
    rate, count = inputs[VIDEO_SAMPLING.name].tolist() if VIDEO_SAMPLING.name in inputs else (0.0, 0.0)
    try:
        if rate and count:
            raise ValueError("both")
        sampling = VideoSampling(FPS.parse(rate) if rate else None, FRAME_COUNT.parse(count) if count else None)
    except ValueError as error:
        raise WireError(
            f"tensor '{VIDEO_SAMPLING.name}' is {[rate, count]}; allowed: frames a second ({FPS.allowed}) or a number "
            f"of frames ({FRAME_COUNT.allowed}), and 0 for the other"
        ) from error
    return MediaFiles(images, videos, sampling, coming)


def _bytes(elements: Sequence[bytes]) -> npt.NDArray[np.object_]:
    array = np.empty(len(elements), dtype=np.object_)
    array[:] = list(elements)
    return array
