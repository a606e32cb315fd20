"""Qwen3-VL (dense): features are added after the first decoder layers, M-RoPE positions, embeddings replaced."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import nn

from deepstack_serving.errors import CheckpointError
from deepstack_serving.families.base import (
    Family,
    ImageProcessing,
    Int64Array,
    Positions,
    VideoProcessing,
    VisionFeatures,
    rope_refusal,
)
from deepstack_serving.families.processor_files import PROCESSOR, VIDEOS
from deepstack_serving.families.qwen3_vl_images import GridImageProcessing, check_processor
from deepstack_serving.families.vision_tower import CapturableTower
from deepstack_serving.files import read_object
from deepstack_serving.injection import InjectionPoint


class Qwen3VL(Family):
    """Features of vision level i belong to decoder layer i and are added after it."""

    model_type = "qwen3_vl"
    injection = InjectionPoint.AFTER_LAYER
    has_image_embeds: ClassVar[bool] = True
    position_axes = 3
    vision_modules = ("visual",)

    def deepstack_layers(self, config: Any) -> tuple[int, ...]:
        return tuple(range(len(config.vision_config.deepstack_visual_indexes)))

    def check_config(self, config: Any) -> None:
        vision, text = config.vision_config, config.text_config
        indexes = list(vision.deepstack_visual_indexes)
        if len(set(indexes)) != len(indexes) or any(not 0 <= index < vision.depth for index in indexes):
            raise CheckpointError(
                f"config.json: vision_config.deepstack_visual_indexes is {indexes}; they must be distinct and below "
                f"the depth of vision_config, {vision.depth}"
            )
        if len(indexes) > text.num_hidden_layers:
            raise CheckpointError(
                f"config.json: vision_config.deepstack_visual_indexes is {indexes}, one for each of the first decoder "
                f"layers, but text_config.num_hidden_layers is {text.num_hidden_layers}"
            )
        if vision.out_hidden_size != text.hidden_size:
            raise CheckpointError(
                f"config.json: vision_config.out_hidden_size is {vision.out_hidden_size}, but text_config.hidden_size "
                f"is {text.hidden_size}"
            )

    def capture_refusal(self, config: Any) -> str | None:
        return rope_refusal(config.text_config)

    def image_token_id(self, config: Any) -> int:
        return int(config.image_token_id)

    def image_processing(self, checkpoint: Path) -> ImageProcessing:
        return GridImageProcessing(checkpoint)

    def video_refusal(self, checkpoint: Path) -> str | None:
        merged = checkpoint / PROCESSOR
        if (checkpoint / VIDEOS).is_file() or (merged.is_file() and "video_processor" in read_object(merged)):
            return None
        return f"this checkpoint has no {VIDEOS}: it takes images, but no video"

    def video_token_id(self, config: Any) -> int:
        return int(config.video_token_id)

    def video_processing(self, checkpoint: Path) -> VideoProcessing:
        from deepstack_serving.families.qwen3_vl_video import GridVideoProcessing  # slow to import

        processing = GridVideoProcessing(checkpoint)
        check_processor(checkpoint, processing.processor, VIDEOS if (checkpoint / VIDEOS).is_file() else PROCESSOR)
        return processing

    def encode(self, model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> VisionFeatures:
        inner = cast(Any, model).model
        if "pixel_values_videos" in inputs:
            pixels, grid = inputs["pixel_values_videos"], inputs["video_grid_thw"]
            output = inner.get_video_features(pixels, grid, return_dict=True)
        else:
            output = inner.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"], return_dict=True)
        levels = {layer: _rows(features) for layer, features in enumerate(output.deepstack_features)}
        return VisionFeatures(_rows(output.pooler_output), levels)

    def capturable_tower(self, model: nn.Module) -> CapturableTower:
        from deepstack_serving.families.qwen3_vl_tower import GridTower  # slow to import

        return GridTower(cast(Any, model).model.visual)

    def positions(
        self, config: Any, input_ids: Int64Array, image_grid_thw: Int64Array, video_grid_thw: Int64Array | None = None
    ) -> Positions:
        ids = torch.from_numpy(input_ids)[None]
        images, videos = (
            torch.tensor(grid) if grid is not None and len(grid) else None for grid in (image_grid_thw, video_grid_thw)
        )
        if images is None and videos is None:
            return Positions(np.broadcast_to(np.arange(len(input_ids)), (3, len(input_ids))), 0)
        positions, delta = _skeleton(_Frozen(config)).get_rope_index(
            ids,
            mm_token_type_ids=(ids == config.image_token_id).int() + 2 * (ids == config.video_token_id).int(),
            image_grid_thw=images,
            video_grid_thw=videos,
        )
        return Positions(positions[:, 0].numpy(), int(delta[0]))


def _rows(features: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    """transformers 5.17 returns one tensor per level, later ones a tuple with one per image."""
    return features if isinstance(features, torch.Tensor) else torch.cat(list(features), 0)


class _Frozen:
    """A hashable handle of a config object, so that its skeleton is built once."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def __hash__(self) -> int:
        return id(self.config)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Frozen) and other.config is self.config


@lru_cache(maxsize=4)
def _skeleton(frozen: _Frozen) -> Any:
    """The model class without layers and weights: `get_rope_index` is a method that needs only the config."""
    from transformers import AutoModel  # slow to import

    config = copy.deepcopy(frozen.config)
    config.text_config.num_hidden_layers = 0
    config.text_config.layer_types = []
    config.vision_config.depth = 0
    config.vision_config.deepstack_visual_indexes = []
    with torch.device("meta"):
        return AutoModel.from_config(config)
