"""The vision encoder: image and video files in, one row of features per image or video token out, for every level.

Files are decoded in threads, also those that the next call will hold; features of a file that was seen before come
from a bounded cache. On a GPU the pixels go there as bytes, the tower runs as vision_graphs.py says, and features stay
there; grids and counts are host tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from PIL.Image import Image

from deepstack_serving.checkpoint import Checkpoint
from deepstack_serving.errors import InvalidRequestError, StageError, WireError
from deepstack_serving.execution.recorder import CudaRecorder, Recorder
from deepstack_serving.feature_cache import FeatureCache, feature_key
from deepstack_serving.media import (
    Decoding,
    MediaFiles,
    decode_video,
    in_batches,
    probe_video,
    raw_bytes,
    raw_video,
    read_each,
)
from deepstack_serving.settings import Settings
from deepstack_serving.stages.cpu_threads import limit_cpu_threads
from deepstack_serving.stages.device import stage_device
from deepstack_serving.stages.info import StageInfo
from deepstack_serving.stages.limits import image_limits, video_limits
from deepstack_serving.stages.loading import load_vision_stage
from deepstack_serving.stages.running import check_execution, compiling_alone
from deepstack_serving.stages.vision_graphs import TowerRunner, named
from deepstack_serving.wire import (
    IMAGE_GRID,
    IMAGE_TOKENS,
    STAGE_INFO,
    VIDEO_GRID,
    VIDEO_TOKENS,
    VISION_ENCODER,
    TensorSpec,
    vision_interface,
)

GROUP_TOKENS = 1024  # of images that run through the tower together


@dataclass(frozen=True)
class _Fitted:
    number: int
    picture: Any


@dataclass(frozen=True)
class Encoded:
    """Features of one image or video, each [tokens, width], and its grid [3]."""

    features: dict[str, torch.Tensor]
    grid: torch.Tensor
    tokens: int


class VisionStage:
    """Loads the vision modules only."""

    def __init__(self, settings: Settings, checkpoint: Checkpoint, name: str = VISION_ENCODER) -> None:
        self.interface = vision_interface(checkpoint.contract)
        self.device = stage_device(settings, name)
        check_execution(settings, self.device)
        limit_cpu_threads(settings, self.device)
        self.info = StageInfo(
            name, checkpoint.fingerprint, checkpoint.contract.dtype, self.device, StageInfo.new_instance()
        )
        self._family, self._dtype = checkpoint.family, checkpoint.dtype
        self._limits, self._video_limits = image_limits(settings), video_limits(settings)
        self._processing = self._family.image_processing(checkpoint.folder)
        has_video = checkpoint.contract.has_video
        self._videos = self._family.video_processing(checkpoint.folder) if has_video else None
        self._settings = settings
        self._model = load_vision_stage(checkpoint, self.device)
        self.runner: TowerRunner | None = None
        self._cache: FeatureCache[Encoded] = FeatureCache(settings.vision_cache_bytes)
        self._decoders = ThreadPoolExecutor(settings.decode_threads, thread_name_prefix="decode")
        self._decoding = Decoding(self._decoders, self._limits, self._fit)
        if self.device != "cpu":
            self.start_tower(None if settings.execution == "eager" else CudaRecorder(self.device))

    @torch.inference_mode()
    def start_tower(self, recorder: Recorder | None) -> None:
        """Run the tower without host work from now on, as graphs of the recorder, where the family can.

        Raises SettingsError when compiling or capturing fails and no fallback is allowed.
        """
        tower = self._family.capturable_tower(self._model)
        if tower is None:
            return
        self.runner = TowerRunner(tower, self._settings)
        with compiling_alone(self._settings, self.device, self._model.config, compiles=self.runner.is_compiled):
            self.runner.start(recorder)
        torch.cuda.empty_cache()
        execution = "graph" if self.runner.captures else "eager"
        self.info = replace(self.info, execution=execution, compiled=self.runner.is_compiled)

    def run(self, files: MediaFiles, wanted: Collection[str]) -> dict[str, torch.Tensor]:
        """Features of the images, in order, then of the videos, packed, with their grids and token counts."""
        if self.info.answers(wanted):
            return {STAGE_INFO.name: self.info.to_tensor()}
        images = self._encode_images(read_each("image", files.images, raw_bytes), () if files.videos else files.coming)
        raw_videos = read_each("video", files.videos, raw_video)
        videos = [self._encode_video(index, file, files) for index, file in enumerate(raw_videos)]
        outputs = {
            spec.name: self._packed([*images, *videos], spec)
            for spec in self.interface.outputs
            if spec.name == "image_embeds" or spec.name.startswith("ds_")
        }
        outputs |= _sizes(images, IMAGE_GRID, IMAGE_TOKENS)
        return outputs | (_sizes(videos, VIDEO_GRID, VIDEO_TOKENS) if self._videos else {})

    def close(self) -> None:
        """Stop the decoding threads."""
        self._decoders.shutdown(cancel_futures=True)

    def _encode_images(self, files: list[bytes], coming: Collection[bytes]) -> list[Encoded]:
        keys = [self._key(file) for file in files]
        found = {key: image for key in keys if (image := self._cache.get(key)) is not None}
        missing: dict[str, int] = {}
        for number, key in enumerate(keys):
            if key not in found:
                missing.setdefault(key, number)
        later = list(_readable(coming))
        self._decoding.forget_all_but([*files, *later])
        fresh: dict[int, Encoded] = {}
        for batch in in_batches({number: files[number] for number in missing.values()}, self._limits):
            fitted = self._decoding.each(batch)
            for group in _grouped(fitted):
                inputs = self._processing.assemble([item.picture for item in group], self.device, self._dtype)
                images = self._encode(inputs, inputs[IMAGE_GRID.name], self._processing.token_counts(inputs))
                fresh |= {item.number: image for item, image in zip(group, images, strict=True)}
        self._decoding.expect(file for file in later if file not in files and self._key(file) not in self._cache)
        _check_finite(list(fresh.values()))
        for key, number in missing.items():
            found[key] = fresh[number]
            self._keep(key, fresh[number])
        return [found[key] for key in keys]

    def _key(self, file: bytes) -> str:
        return feature_key(file, self._limits, self.info.fingerprint, self.info.dtype)

    def _fit(self, image: Image) -> tuple[Any, int]:
        """What the tower's inputs are made of, and how many tokens it comes to."""
        return self._processing.fit(image), self._processing.token_count(image.width, image.height)

    def _encode_video(self, number: int, file: bytes, files: MediaFiles) -> Encoded:
        """One video at a time: its frames are many."""
        if self._videos is None:
            raise WireError("this model takes no video")
        key = feature_key(file, self._video_limits, files.sampling, self.info.fingerprint, self.info.dtype)
        video = self._cache.get(key)
        if video is None:
            try:
                header = probe_video(file, self._video_limits)
                indices = self._videos.sample(header, files.sampling)
                tokens = self._videos.plan(header, indices).tokens
                frames = self._decoders.submit(decode_video, file, header, indices, self._video_limits).result()
            except InvalidRequestError as error:
                raise InvalidRequestError(f"video[{number}]: {error}") from error
            inputs = self._videos.prepare(frames)
            [video] = self._encode(inputs, inputs[VIDEO_GRID.name], [tokens])
            _check_finite([video])
            self._keep(key, video)
        return video

    def _packed(self, encoded: Sequence[Encoded], spec: TensorSpec) -> torch.Tensor:
        none = torch.zeros(0, spec.shape[-1], dtype=self._dtype, device=self.device)
        return torch.cat([item.features[spec.name] for item in encoded]) if encoded else none

    def _keep(self, key: str, encoded: Encoded) -> None:
        self._cache.put(key, encoded, sum(tensor.nbytes for tensor in encoded.features.values()))

    @torch.inference_mode()
    def _encode(self, inputs: dict[str, torch.Tensor], grids: torch.Tensor, counts: list[int]) -> list[Encoded]:
        if self.runner is not None:
            features = self.runner.run(inputs)
        else:
            moved = {name: tensor.to(self.device) for name, tensor in inputs.items()}
            features = named(self._family.encode(self._model, moved))
        for name, tensor in features.items():
            if len(tensor) != sum(counts):
                raise StageError(f"the encoder gave {len(tensor)} rows of {name!r} for {sum(counts)} image tokens")
        # Each of several keeps copies: a view would hold the whole batch in the cache.
        parts = {
            name: [part.clone() if len(counts) > 1 else part for part in torch.split(tensor.to(self._dtype), counts)]
            for name, tensor in features.items()
        }
        return [
            Encoded({name: parts[name][index] for name in parts}, grids[index], count)
            for index, count in enumerate(counts)
        ]


def _readable(payloads: Iterable[bytes]) -> Iterator[bytes]:
    """The files that they carry; what carries none is the matter of its own call."""
    for payload in payloads:
        with suppress(InvalidRequestError):
            yield raw_bytes(payload)


def _grouped(fitted: Iterable[tuple[int, tuple[Any, int]]]) -> Iterator[list[_Fitted]]:
    """Neighbours that run through the tower together: small images, or a large one alone.

    So the tower computes the first ones while others are being decoded; it gains nothing from more rows at once.
    """
    group: list[_Fitted] = []
    tokens = 0
    for number, (picture, count) in fitted:
        if group and tokens + count > GROUP_TOKENS:
            yield group
            group, tokens = [], 0
        group.append(_Fitted(number, picture))
        tokens += count
    if group:
        yield group


def _check_finite(encoded: Sequence[Encoded]) -> None:
    """The one wait of a call for the device."""
    if not encoded:
        return
    names = list(encoded[0].features)
    finite = [torch.stack([item.features[name].isfinite().all() for item in encoded]).all() for name in names]
    for name, is_finite in zip(names, torch.stack(finite).tolist(), strict=True):
        if not is_finite:
            raise StageError(
                f"the encoder gave values of {name!r} that are not finite; the images or videos are not answered"
            )


def _sizes(encoded: Sequence[Encoded], grid: TensorSpec, tokens: TensorSpec) -> dict[str, torch.Tensor]:
    grids = torch.stack([item.grid for item in encoded]) if encoded else torch.zeros(0, 3, dtype=torch.int64)
    return {grid.name: grids, tokens.name: torch.tensor([item.tokens for item in encoded], dtype=torch.int64)}
