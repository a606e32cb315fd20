"""Videos of Qwen3-VL: which frames to take, what stands for them in the prompt, and their patches.

transformers' own video processor and prompt processor do it. Both ask for torchvision, of which the former uses two
functions; they are torch's own here, because the builds of torchvision fit one build of torch each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers.image_utils import PILImageResampling
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.video_processing_utils import BaseVideoProcessor
from transformers.video_utils import VideoMetadata

from deepstack_serving.errors import CheckpointError, InvalidRequestError
from deepstack_serving.families.base import UInt8Array, VideoPlan, VideoProcessing
from deepstack_serving.media import VideoHeader, VideoSampling


class _TorchFunctions(BaseVideoProcessor):  # type: ignore[misc]
    """Resizing and normalising as torchvision does it on a CPU."""

    def resize(self, image: torch.Tensor, size: Any, **_: object) -> torch.Tensor:
        target = (size.height, size.width)
        if image.is_meta:
            return image.new_empty((*image.shape[:-2], *target))
        if tuple(image.shape[-2:]) == target:
            return image
        resized = torch.nn.functional.interpolate(image.flatten(0, -4), target, mode="bicubic", antialias=True)
        return resized.reshape(*image.shape[:-2], *target)

    def convert_to_rgb(self, video: torch.Tensor, **_: object) -> torch.Tensor:
        return video  # decoded frames are RGB

    def normalize(self, image: torch.Tensor, mean: Any, std: Any, **_: object) -> torch.Tensor:
        means, deviations = (torch.as_tensor(value, dtype=image.dtype).view(-1, 1, 1) for value in (mean, std))
        return image.sub(means).div_(deviations)


class _VideoProcessor(Qwen3VLVideoProcessor, _TorchFunctions):  # type: ignore[misc]
    """Qwen3VLVideoProcessor calls what it inherits, which is found in the class above first."""

    def options(self) -> dict[str, Any]:
        """What its own `__call__` fills in: an unset cap counts as none."""
        return {"cap_pixels_per_frame": bool(self.cap_pixels_per_frame)}

    def grid(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Patches of a video of this size: time, height, width."""
        shape = self.resize(
            torch.empty((1, frames, 3, height, width), dtype=torch.uint8, device="meta"),
            size=self.size,
            resample=self.resample,
            factor=self.patch_size * self.merge_size,
            temporal_factor=self.temporal_patch_size,
            **self.options(),
        ).shape
        return -(-frames // self.temporal_patch_size), shape[-2] // self.patch_size, shape[-1] // self.patch_size


class _PromptWriter(Qwen3VLProcessor):  # type: ignore[misc]
    """`replace_video_token` needs these attributes and none of the parts that the processor is made of."""

    def __init__(self, video_processor: _VideoProcessor) -> None:
        self.video_processor = video_processor
        self.video_token = GridVideoProcessing.placeholder
        self.vision_start_token, self.vision_end_token = "<|vision_start|>", "<|vision_end|>"


class GridVideoProcessing(VideoProcessing):
    """Frames resized to a grid of patches, two at a time; merge_size squared patches make one language token."""

    placeholder: ClassVar[str] = "<|video_pad|>"

    def __init__(self, checkpoint: Path) -> None:
        try:
            self.processor = _VideoProcessor.from_pretrained(checkpoint)
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(f"{checkpoint}: the video processor cannot be read: {error}") from error
        if self.processor.resample != PILImageResampling.BICUBIC:
            raise CheckpointError(
                f"{checkpoint}: the video processor's resample is {self.processor.resample}; served is "
                f"{PILImageResampling.BICUBIC.value} (bicubic)"
            )
        self._writer = _PromptWriter(self.processor)

    def sample(self, header: VideoHeader, sampling: VideoSampling) -> tuple[int, ...]:
        count, rate = sampling.frame_count, sampling.frames_per_second
        if count is None and rate is None:
            count = self.processor.num_frames
            rate = None if count is not None else self.processor.fps
        indices: Iterable[int] = range(header.frames)
        if not header.chosen:
            indices = self.processor.sample_frames(_metadata(header), num_frames=count, fps=rate)
        taken = tuple(int(index) for index in indices)
        # One frame fills its patch by itself, as the last of an odd number does.
        return taken * self.processor.temporal_patch_size if len(taken) == 1 else taken

    def plan(self, header: VideoHeader, indices: Sequence[int]) -> VideoPlan:
        try:
            grid = self.processor.grid(len(indices), header.height, header.width)
        except ValueError as error:
            raise InvalidRequestError(f"{len(indices)} frames of {header.size} cannot be encoded: {error}") from error
        metadata = _metadata(header)
        metadata.frames_indices = list(indices)
        text = self._writer.replace_video_token(
            {"video_grid_thw": torch.tensor([grid]), "video_metadata": [metadata]}, video_idx=0
        )
        return VideoPlan(math.prod(grid) // self.processor.merge_size**2, text)

    def prepare(self, frames: UInt8Array) -> dict[str, torch.Tensor]:
        pixels = torch.from_numpy(frames).permute(0, 3, 1, 2).contiguous()
        return dict(self.processor([pixels], return_tensors="pt", do_sample_frames=False, **self.processor.options()))


def _metadata(header: VideoHeader) -> VideoMetadata:
    return VideoMetadata(total_num_frames=header.frames, fps=header.frames_per_second)
