"""Images of Qwen3-VL: resized to a grid of patches by the checkpoint's own processor, and laid out for the tower.

The processor works on the CPU, in double precision. The value that it gives a pixel depends on the pixel's byte and its
channel alone, so it is asked once for all of them: then bytes go to the tower's device, where they are cut into patches
and looked up. That gives the processor's own values, to the bit, whatever its files say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from deepstack_serving.errors import CheckpointError, InvalidRequestError
from deepstack_serving.families.base import ImageProcessing
from deepstack_serving.families.processor_files import IMAGES, disagreement, holder

# What the processor and the model must agree on, by their names for it.
GRID_KEYS = {
    "patch_size": "vision_config.patch_size",
    "temporal_patch_size": "vision_config.temporal_patch_size",
    "merge_size": "vision_config.spatial_merge_size",
}
_CHANNELS, _BYTES = 3, 256


class GridImageProcessing(ImageProcessing):
    """Images resized to a grid of patches; merge_size squared patches make one language token."""

    def __init__(self, checkpoint: Path) -> None:
        from transformers.models.auto.image_processing_auto import AutoImageProcessor  # slow to import

        # The PIL backend gives the same pixels on every machine; transformers would pick torchvision where it is found.
        try:
            self._processor = AutoImageProcessor.from_pretrained(checkpoint, backend="pil")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{checkpoint}: the image processor cannot be read: {error}") from error
        check_processor(checkpoint, self._processor)
        self._merge = int(self._processor.merge_size)
        self._values = _values(self._processor) if _is_known(self._processor) else None

    @property
    def by_table(self) -> bool:
        """Whether pixels are looked up; False: the processor of this checkpoint does every step itself."""
        return self._values is not None

    def token_count(self, width: int, height: int) -> int:
        try:
            patches = self._processor.get_number_of_image_patches(height, width)
        except ValueError as error:
            raise _cannot_encode(width, height, error) from error
        tokens = int(patches) // self._merge**2
        if tokens == 0:
            raise InvalidRequestError(f"an image of {width}x{height} pixels is too small: it would give no image token")
        return tokens

    def fit(self, image: Image.Image) -> Image.Image | torch.Tensor:
        """Where pixels are looked up, bytes [channels, height, width] of the processor's size."""
        if self._values is None:
            return image
        processor = self._processor
        pixels = processor.process_image(_resized(image, processor), do_convert_rgb=processor.do_convert_rgb)
        return torch.from_numpy(pixels)

    def assemble(
        self, fitted: Sequence[Image.Image | torch.Tensor], device: str, dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        pixels = [item for item in fitted if isinstance(item, torch.Tensor)]
        if self._values is None or len(pixels) < len(fitted):
            return dict(self._processor(images=list(fitted), return_tensors="pt"))
        values = self._values.to(device, dtype, non_blocking=True)
        patch = self._processor.patch_size
        rows = [self._rows(_moved(item, device), values) for item in pixels]
        grids = [(1, item.shape[1] // patch, item.shape[2] // patch) for item in pixels]
        return {
            "pixel_values": torch.cat(rows) if len(rows) > 1 else rows[0],
            "image_grid_thw": torch.tensor(grids, dtype=torch.int64),
        }

    def token_counts(self, inputs: Mapping[str, torch.Tensor]) -> list[int]:
        return [int(count) // self._merge**2 for count in inputs["image_grid_thw"].prod(-1)]

    def _rows(self, pixels: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Bytes [channels, height, width] -> [patches, values of a patch], blocks of merged patches together."""
        merge, side, repeats = self._merge, self._processor.patch_size, self._processor.temporal_patch_size
        down, across = (size // (merge * side) for size in pixels.shape[1:])
        cut = pixels.reshape(_CHANNELS, down, merge, side, across, merge, side).permute(1, 4, 2, 5, 0, 3, 6)
        places = cut.reshape(-1, _CHANNELS, 1, side * side).to(torch.int32)
        places += torch.arange(_CHANNELS, dtype=torch.int32, device=pixels.device).view(1, -1, 1, 1) * _BYTES
        found = values.index_select(0, places.flatten()).view(places.shape)
        return found.expand(-1, -1, repeats, -1).reshape(len(places), -1)


def _moved(pixels: torch.Tensor, device: str) -> torch.Tensor:
    """To the device, without waiting for it: another process may have the GPU for the next milliseconds."""
    return pixels if device == "cpu" else pixels.pin_memory().to(device, non_blocking=True)


def check_processor(checkpoint: Path, processor: Any, file: str | None = None) -> None:
    """Raises CheckpointError where patches would not be cut and merged as the encoder takes them."""
    from transformers import AutoConfig  # slow to import

    config = AutoConfig.from_pretrained(checkpoint)
    for key, model_key in GRID_KEYS.items():
        if getattr(processor, key) != attrgetter(model_key)(config):
            path = checkpoint / file if file else holder(checkpoint, key, IMAGES)
            raise disagreement(path, key, getattr(processor, key), config, model_key)


def _is_known(processor: Any) -> bool:
    """Whether it is the processor that this module knows, used as it is meant to be: it resizes to whole patches."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil  # slow to import

    return (
        type(processor) is Qwen2VLImageProcessorPil
        and processor.do_resize is True
        and bool(processor.size.shortest_edge and processor.size.longest_edge)
        and isinstance(processor.resample, int)
    )


def _values(processor: Any) -> torch.Tensor:
    """What the processor makes of every byte, [channels * 256], one channel after the other."""
    every = np.broadcast_to(np.arange(_BYTES, dtype=np.uint8), (_CHANNELS, 1, _BYTES))
    if processor.do_rescale:
        every = processor.rescale(every, processor.rescale_factor)
    if processor.do_normalize:
        every = processor.normalize(every, processor.image_mean, processor.image_std)
    return torch.from_numpy(np.array(every, dtype=np.float32).reshape(-1))


def _resized(image: Image.Image, processor: Any) -> Image.Image:
    from transformers.image_transforms import resize  # slow to import
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    factor, size = processor.patch_size * processor.merge_size, processor.size
    try:
        target = smart_resize(
            image.height, image.width, factor, min_pixels=size.shortest_edge, max_pixels=size.longest_edge
        )
    except ValueError as error:
        raise _cannot_encode(*image.size, error) from error
    if target == (image.height, image.width):
        return image
    resized: Image.Image = resize(
        image, target, processor.resample, input_data_format="channels_last", return_numpy=False
    )
    return resized


def _cannot_encode(width: int, height: int, error: ValueError) -> InvalidRequestError:
    return InvalidRequestError(f"an image of {width}x{height} pixels cannot be encoded: {error}")
