"""The vision encoder: image files in, one row of features per image token out, for every level.

Files are decoded in threads; features of an image that was seen before come from a bounded cache.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from PIL.Image import Image

from deepstack_serving.checkpoint import Checkpoint
from deepstack_serving.errors import StageError
from deepstack_serving.feature_cache import FeatureCache, feature_key
from deepstack_serving.media import ImageLimits, decode_all, raw_bytes
from deepstack_serving.settings import Settings
from deepstack_serving.stages.device import limit_cpu_threads, stage_device
from deepstack_serving.stages.info import StageInfo
from deepstack_serving.stages.loading import load_vision_stage
from deepstack_serving.wire import STAGE_INFO, VISION_ENCODER, deepstack_name, vision_interface


@dataclass(frozen=True)
class EncodedImage:
    """Features of one image, each [image tokens, width], and its grid [3]."""

    features: dict[str, torch.Tensor]
    grid: torch.Tensor
    tokens: int


class VisionStage:
    """Loads the vision modules only."""

    def __init__(self, settings: Settings, checkpoint: Checkpoint) -> None:
        self.interface = vision_interface(checkpoint.contract)
        self.device = stage_device(settings, VISION_ENCODER)
        limit_cpu_threads(settings)
        self.info = StageInfo(
            VISION_ENCODER, checkpoint.fingerprint, checkpoint.contract.dtype, self.device, StageInfo.new_instance()
        )
        self._family, self._dtype = checkpoint.family, checkpoint.dtype
        self._limits = ImageLimits(max_pixels=settings.max_image_pixels, max_bytes=settings.max_image_bytes)
        self._processing = self._family.image_processing(checkpoint.folder)
        self._model = load_vision_stage(checkpoint, self.device)
        self._cache: FeatureCache[EncodedImage] = FeatureCache(settings.vision_cache_bytes)
        self._decoders = ThreadPoolExecutor(settings.decode_threads, thread_name_prefix="decode")

    def run(self, files: Sequence[bytes], wanted: Collection[str]) -> dict[str, torch.Tensor]:
        """Features of the images in order, packed, with their grids and token counts."""
        if self.info.answers(wanted):
            return {STAGE_INFO.name: self.info.to_tensor()}
        images = self._encode_all([raw_bytes(file) for file in files])
        names = [
            spec.name for spec in self.interface.outputs if spec.name == "image_embeds" or spec.name.startswith("ds_")
        ]
        outputs = {name: torch.cat([image.features[name] for image in images]) for name in names if images}
        outputs["image_grid_thw"] = (
            torch.stack([image.grid for image in images]) if images else torch.zeros(0, 3).long()
        )
        outputs["image_tokens"] = torch.tensor([image.tokens for image in images], dtype=torch.int64)
        return outputs

    def close(self) -> None:
        """Stop the decoding threads."""
        self._decoders.shutdown(cancel_futures=True)

    def _encode_all(self, files: list[bytes]) -> list[EncodedImage]:
        keys = [feature_key(file, self._limits, self.info.fingerprint, self.info.dtype) for file in files]
        found = {key: image for key in keys if (image := self._cache.get(key)) is not None}
        missing: dict[str, int] = {}
        for number, key in enumerate(keys):
            if key not in found:
                missing.setdefault(key, number)
        decoded = decode_all({number: files[number] for number in missing.values()}, self._limits, self._decoders)
        for key, image in zip(missing, self._encode(decoded), strict=True):
            found[key] = image
            self._cache.put(key, image, sum(tensor.nbytes for tensor in image.features.values()))
        return [found[key] for key in keys]

    @torch.inference_mode()
    def _encode(self, images: list[Image]) -> list[EncodedImage]:
        if not images:
            return []
        inputs = self._processing.prepare(images)
        counts = self._processing.token_counts(inputs)
        encoded = self._family.encode(self._model, {name: tensor.to(self.device) for name, tensor in inputs.items()})
        features = {deepstack_name(layer): tensor for layer, tensor in encoded.deepstack.items()}
        if encoded.image_embeds is not None:
            features["image_embeds"] = encoded.image_embeds
        self._check(features, sum(counts))
        # Each image keeps copies: a view would hold the whole batch in the cache.
        parts = {
            name: [part.clone() for part in torch.split(tensor.to(self._dtype), counts)]
            for name, tensor in features.items()
        }
        return [
            EncodedImage({name: parts[name][index] for name in parts}, inputs["image_grid_thw"][index], count)
            for index, count in enumerate(counts)
        ]

    def _check(self, features: dict[str, torch.Tensor], rows: int) -> None:
        for name, tensor in features.items():
            if len(tensor) != rows:
                raise StageError(f"the encoder gave {len(tensor)} rows of {name!r} for {rows} image tokens")
            if not bool(tensor.isfinite().all()):
                raise StageError(
                    f"the encoder gave values of {name!r} that are not finite; the images are not answered"
                )
