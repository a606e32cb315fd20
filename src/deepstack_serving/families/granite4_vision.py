"""Granite 4 Vision: features are added before many decoder layers, placeholder embeddings are zero, positions count.

An image is a thumbnail and a grid of tiles (anyres). Its rows are the thumbnail's, then the tiles' without their
padding, with one newline vector after each row of the grid; every feature tensor has the same rows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch
from PIL.Image import Image
from torch import nn

from deepstack_serving.errors import CheckpointError
from deepstack_serving.families.base import (
    Family,
    ImageProcessing,
    Int64Array,
    Positions,
    VisionFeatures,
    rope_refusal,
)
from deepstack_serving.families.processor_files import disagreement, holder
from deepstack_serving.injection import InjectionPoint

SPATIAL_GROUPS = 4  # the model has one spatial projector for each corner of a 2x2 block
TOWERS = ("siglip_vision_model",)  # towers without a class token


class TiledImageProcessing(ImageProcessing):
    """Images as a thumbnail and tiles of one size; the checkpoint's own processor counts their tokens."""

    def __init__(self, checkpoint: Path) -> None:
        from transformers import AutoConfig, AutoProcessor  # slow to import

        try:
            # The PIL backend gives the same pixels everywhere; transformers would pick torchvision where it is found.
            self._processor = cast(Any, AutoProcessor).from_pretrained(checkpoint, backend="pil")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{checkpoint}: the processor cannot be read: {error}") from error
        self._config = AutoConfig.from_pretrained(checkpoint)
        _check_processor(checkpoint, self._processor, self._config)

    def token_count(self, width: int, height: int) -> int:
        return int(self._processor._get_num_multimodal_tokens(image_sizes=[(height, width)]).num_image_tokens[0])

    def fit(self, image: Image) -> Image:
        return image

    def assemble(
        self, fitted: Sequence[Image | torch.Tensor], device: str, dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        inputs = self._processor.image_processor(list(fitted), do_pad=True, return_tensors="pt")
        grids = [self._grid(height, width) for height, width in inputs["image_sizes"].tolist()]
        return {**inputs, "image_grid_thw": torch.tensor(grids, dtype=torch.int64).reshape(-1, 3)}

    def token_counts(self, inputs: Mapping[str, torch.Tensor]) -> list[int]:
        return [self.token_count(width, height) for height, width in inputs["image_sizes"].tolist()]

    def _grid(self, height: int, width: int) -> tuple[int, int, int]:
        """Rows and columns of the tiles' tokens, without padding, thumbnail and newline vectors."""
        from transformers.image_processing_utils import select_best_resolution  # slow to import

        vision = self._config.vision_config
        side = int(vision.image_size // vision.patch_size * Fraction(self._config.downsample_rate))
        best = select_best_resolution((height, width), self._config.image_grid_pinpoints)
        tiles = [length // vision.image_size for length in best]
        cells, rows = self._processor._get_unpadded_features(height, width, side, side, *tiles)
        return 1, int(rows), int(cells) // int(rows) if rows else 0


class Granite4Vision(Family):
    """The config maps vision layers to decoder layers, and spatial groups of one vision layer to further ones."""

    model_type = "granite4_vision"
    injection = InjectionPoint.BEFORE_LAYER
    has_image_embeds: ClassVar[bool] = False
    position_axes = 1
    images_may_touch = True
    # The newline vector stays in every stage: transformers initialises it in every model of the class.
    vision_modules = ("vision_tower", "layerwise_projectors", "spatial_projectors")

    def deepstack_layers(self, config: Any) -> tuple[int, ...]:
        return (*(int(layer) for _, layer in config.deepstack_layer_map), *map(int, config.spatial_target_layers))

    def check_values(self, values: Mapping[str, Any]) -> None:
        for key, kind, fits in (
            ("deepstack_layer_map", "pairs of whole numbers", _is_pair),
            ("image_grid_pinpoints", "pairs of whole numbers", _is_pair),
            ("spatial_target_layers", "whole numbers", _is_whole),
        ):
            found = values.get(key)
            if found is not None and not (isinstance(found, list) and all(map(fits, found))):
                raise CheckpointError(f"config.json: {key} is {found!r}; it must be a list of {kind}")

    def check_config(self, config: Any) -> None:
        _check_layers(config)
        _check_targets(config, self.deepstack_layers(config))
        _check_tower(config)
        for key in ("use_spatial_sampling", "use_image_newline_parameter"):  # of earlier, remote code
            if getattr(config, key, True) is not True:
                raise CheckpointError(f"config.json: {key} is {getattr(config, key)}, but the model always does it")

    def capture_refusal(self, config: Any) -> str | None:
        return rope_refusal(config.text_config)

    def image_token_id(self, config: Any) -> int:
        return int(config.image_token_id)

    def image_processing(self, checkpoint: Path) -> ImageProcessing:
        return TiledImageProcessing(checkpoint)

    def encode(self, model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> VisionFeatures:
        output = cast(Any, model).model.get_image_features(
            inputs["pixel_values"], inputs["image_sizes"], return_dict=True
        )
        return VisionFeatures(None, {int(layer): torch.cat(list(rows)) for layer, rows in output.deepstack_features})

    def capturable_tower(self, model: nn.Module) -> None:
        return None  # packing the tiles' rows reads the sizes of the images

    def positions(
        self, config: Any, input_ids: Int64Array, image_grid_thw: Int64Array, video_grid_thw: Int64Array | None = None
    ) -> Positions:
        return Positions(np.arange(len(input_ids), dtype=np.int64)[None], 0)

    def embed(self, model: nn.Module, input_ids: torch.Tensor) -> torch.Tensor:
        return super().embed(model, input_ids) * float(self.text_model(model).config.embedding_multiplier)

    def replace_image_rows(
        self, hidden: torch.Tensor, rows: torch.Tensor, image_embeds: torch.Tensor | None, sources: torch.Tensor
    ) -> torch.Tensor:
        return hidden.index_fill(0, rows, 0.0)  # zero before the embedding multiplier is zero after it

    def logits(self, model: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        return super().logits(model, hidden) / float(self.text_model(model).config.logits_scaling)

    def rotary(self, model: nn.Module, hidden: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return super().rotary(model, hidden, position_ids[0])


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_pair(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_whole, value))


def _check_layers(config: Any) -> None:
    if not config.deepstack_layer_map or not config.downsample_rate:
        raise CheckpointError("config.json: deepstack_layer_map or downsample_rate is missing")
    depth = config.vision_config.num_hidden_layers
    levels = [*(level for level, _ in config.deepstack_layer_map), config.spatial_vision_layer]
    if any(not -depth - 1 <= level <= depth for level in levels):
        raise CheckpointError(
            f"config.json: deepstack_layer_map and spatial_vision_layer name the vision layers {levels}, but "
            f"vision_config.num_hidden_layers is {depth}"
        )
    if len(config.spatial_target_layers) > SPATIAL_GROUPS:
        raise CheckpointError(
            f"config.json: spatial_target_layers is {list(config.spatial_target_layers)}, but there are "
            f"{SPATIAL_GROUPS} spatial groups"
        )


def _check_targets(config: Any, targets: Sequence[int]) -> None:
    layers = config.text_config.num_hidden_layers
    wrong = sorted({layer for layer in targets if targets.count(layer) > 1 or not 0 <= layer < layers})
    if wrong:
        raise CheckpointError(
            f"config.json: deepstack_layer_map {[list(pair) for pair in config.deepstack_layer_map]} and "
            f"spatial_target_layers {list(config.spatial_target_layers)} name the decoder layers {wrong} twice, or "
            f"beyond the {layers} of text_config.num_hidden_layers"
        )


def _check_tower(config: Any) -> None:
    vision, strategy = config.vision_config, config.vision_feature_select_strategy
    if vision.model_type not in TOWERS or strategy != "full":
        raise CheckpointError(
            f"config.json: vision_config.model_type is {vision.model_type!r} and vision_feature_select_strategy is "
            f"{strategy!r}; served are {', '.join(TOWERS)} with 'full'"
        )
    if not (
        _is_whole(vision.image_size) and _is_whole(vision.patch_size) and vision.image_size >= vision.patch_size > 0
    ):
        raise CheckpointError(
            f"config.json: vision_config.image_size is {vision.image_size} and vision_config.patch_size is "
            f"{vision.patch_size}; they must be whole numbers above 0, the patch no larger than the image"
        )
    side = vision.image_size // vision.patch_size
    parts = re.fullmatch(r"(\d+)/([1-9]\d*)", config.downsample_rate)
    if not parts or side % int(parts[2]) or 2 * int(parts[1]) != int(parts[2]):
        raise CheckpointError(
            f"config.json: downsample_rate is {config.downsample_rate!r}, but vision_config gives {side}x{side} "
            "patches, which it must halve in whole windows"
        )
    odd = [list(size) for size in config.image_grid_pinpoints if any(length % vision.image_size for length in size)]
    if odd:
        raise CheckpointError(
            f"config.json: image_grid_pinpoints has {odd}, which are no multiples of vision_config.image_size "
            f"{vision.image_size}"
        )


def _check_processor(checkpoint: Path, processor: Any, config: Any) -> None:
    """What the processor cuts and counts must be what the model expects."""
    images, vision = processor.image_processor, config.vision_config
    pinpoints, side = _lists(images.image_grid_pinpoints), vision.image_size
    size, crop = _sides(images.size), _sides(images.crop_size)
    rate = processor.downsample_rate
    same_rate = _is_fraction(rate) and Fraction(rate) == Fraction(config.downsample_rate)
    strategy = processor.vision_feature_select_strategy
    for key, value, agrees, model_key in (
        ("image_grid_pinpoints", pinpoints, pinpoints == _lists(config.image_grid_pinpoints), "image_grid_pinpoints"),
        ("size", size, set(size) == {side}, "vision_config.image_size"),
        ("crop_size", crop, set(crop) in ({side}, set()), "vision_config.image_size"),
        ("patch_size", processor.patch_size, processor.patch_size == vision.patch_size, "vision_config.patch_size"),
        ("downsample_rate", rate, same_rate, "downsample_rate"),
        ("vision_feature_select_strategy", strategy, strategy == "full", "vision_feature_select_strategy"),
        ("image_token", processor.image_token_id, processor.image_token_id == config.image_token_id, "image_token_id"),
    ):
        if not agrees:
            raise disagreement(holder(checkpoint, key), key, value, config, model_key)
    if processor.num_additional_image_tokens:
        path = holder(checkpoint, "num_additional_image_tokens")
        raise CheckpointError(
            f"{path}: num_additional_image_tokens is {processor.num_additional_image_tokens}, but the tower of "
            f"config.json, {vision.model_type!r}, has 0"
        )


def _is_fraction(text: Any) -> bool:
    return isinstance(text, str) and re.fullmatch(r"\d+/[1-9]\d*", text) is not None


def _lists(sizes: Sequence[Sequence[int]]) -> list[list[int]]:
    return [list(size) for size in sizes]


def _sides(size: Any) -> list[int]:
    return [length for length in (size.shortest_edge, size.height, size.width) if length] if size else []
