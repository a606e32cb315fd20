"""What the serving code needs to know about a model family. One file per family implements it; nothing else names one.

Model code is transformers' own: a family says which of its modules a stage keeps and which public methods to call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
import numpy.typing as npt
import torch
from PIL.Image import Image
from torch import nn

from deepstack_serving.errors import CheckpointError, WireError
from deepstack_serving.injection import InjectionPoint
from deepstack_serving.media import VideoHeader, VideoSampling

if TYPE_CHECKING:  # it is built on what this module defines
    from deepstack_serving.families.vision_tower import CapturableTower

Int64Array = npt.NDArray[np.int64]
UInt8Array = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class VisionFeatures:
    """Features of some images or of one video, rows packed in order.

    `image_embeds` is [rows, width], None where the family has none; `deepstack` maps a decoder layer to [rows, width].
    """

    image_embeds: torch.Tensor | None
    deepstack: Mapping[int, torch.Tensor]


@dataclass(frozen=True)
class Positions:
    """Rotary positions of a prompt, [axes, tokens], and what to add to the index of each later token."""

    prompt: Int64Array
    delta: int


class ImageProcessing(ABC):
    """Turns decoded images into the encoder's inputs, and says beforehand how many tokens an image takes."""

    @abstractmethod
    def token_count(self, width: int, height: int) -> int:
        """Language tokens of an image of this size. Raises InvalidRequestError for a size that cannot be encoded."""

    @abstractmethod
    def token_counts(self, inputs: Mapping[str, torch.Tensor]) -> list[int]:
        """Language tokens of each image in what `prepare` returned."""

    def prepare(self, images: Sequence[Image], device: str = "cpu") -> dict[str, torch.Tensor]:
        """Pixel values and grids of RGB images, as the family's `encode` takes them."""
        return self.assemble([self.fit(image) for image in images], device, torch.float32)

    @abstractmethod
    def fit(self, image: Image) -> Image | torch.Tensor:
        """The part of `prepare` that each image needs alone, for a thread of its own."""

    @abstractmethod
    def assemble(
        self, fitted: Sequence[Image | torch.Tensor], device: str, dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        """The rest of `prepare`. Pixel values may be on `device` and of `dtype` already, as the encoder wants them;
        everything else is on the host.
        """


@dataclass(frozen=True)
class VideoPlan:
    """The language tokens of some frames of a video, and the text that stands for them in a prompt."""

    tokens: int
    text: str


class VideoProcessing(ABC):
    """Chooses frames of a video and turns them into the encoder's inputs."""

    placeholder: ClassVar[str]  # what a chat template writes for a video

    @abstractmethod
    def sample(self, header: VideoHeader, sampling: VideoSampling) -> tuple[int, ...]:
        """The numbers of the frames to take, by the request or else by the checkpoint."""

    @abstractmethod
    def plan(self, header: VideoHeader, indices: Sequence[int]) -> VideoPlan:
        """What these frames will be. Raises InvalidRequestError for a size that cannot be encoded."""

    @abstractmethod
    def prepare(self, frames: UInt8Array) -> dict[str, torch.Tensor]:
        """Pixel values and `video_grid_thw` [1, 3] of RGB frames [frames, height, width, 3], for `encode`."""


HOST_ROPE_TYPES = ("dynamic", "longrope")  # transformers looks at the largest position to choose their frequencies


def rope_refusal(text_config: Any) -> str | None:
    """A `Family.capture_refusal` for layers whose only decision on the host may be that of rotary frequencies."""
    kind = (text_config.rope_parameters or {}).get("rope_type", "default")
    return f"rotary embeddings of type {kind!r} cannot be captured" if kind in HOST_ROPE_TYPES else None


class Family(ABC):
    """The differences between model families, as data and a few calls into transformers."""

    model_type: ClassVar[str]
    injection: ClassVar[InjectionPoint]
    has_image_embeds: ClassVar[bool]
    position_axes: ClassVar[int]
    vision_modules: ClassVar[tuple[str, ...]]
    text_module: ClassVar[str] = "language_model"
    images_may_touch: ClassVar[bool] = False  # whether two placeholders may stand side by side in a prompt

    def load_options(self) -> Mapping[str, str]:
        """Further arguments of transformers' from_pretrained."""
        return {}

    @abstractmethod
    def deepstack_layers(self, config: Any) -> tuple[int, ...]:
        """The decoder layers that receive features, as the checkpoint's config states them, duplicates included."""

    def check_values(self, values: Mapping[str, Any]) -> None:
        """Raises CheckpointError for values of config.json of a wrong type that transformers' classes let pass."""
        return

    @abstractmethod
    def check_config(self, config: Any) -> None:
        """Raises CheckpointError when entries of the config contradict each other."""

    @abstractmethod
    def capture_refusal(self, config: Any) -> str | None:
        """Why the decoder layers of this config cannot be captured in a CUDA graph; None where they can."""

    @abstractmethod
    def image_token_id(self, config: Any) -> int:
        """The id of the placeholder token that each image row takes in a prompt."""

    @abstractmethod
    def image_processing(self, checkpoint: Path) -> ImageProcessing:
        """The checkpoint's image processing, on PIL and numpy whatever else is installed."""

    def video_refusal(self, checkpoint: Path) -> str | None:
        """Why this checkpoint takes no videos; None where it does. Looks at files only, and loads nothing."""
        return f"{self.model_type} models take no video"

    def video_token_id(self, config: Any) -> int | None:
        """The id of the placeholder token of videos, None for a family without them."""
        return None

    def video_processing(self, checkpoint: Path) -> VideoProcessing:
        """The checkpoint's video processing; asked for only where `video_refusal` is None."""
        raise CheckpointError(self.video_refusal(checkpoint))

    def placeholder_ids(self, config: Any) -> tuple[int, ...]:
        """The ids of all rows that features replace."""
        video = self.video_token_id(config)
        return (self.image_token_id(config), *(() if video is None else (video,)))

    @abstractmethod
    def encode(self, model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> VisionFeatures:
        """Run the vision modules of a vision stage."""

    @abstractmethod
    def capturable_tower(self, model: nn.Module) -> CapturableTower | None:
        """The vision modules of a vision stage as a GPU runs them best, taken over from `model`, which no one may call
        any more; None where they read values back from the device: then `encode` is all there is.
        """

    @abstractmethod
    def positions(
        self, config: Any, input_ids: Int64Array, image_grid_thw: Int64Array, video_grid_thw: Int64Array | None = None
    ) -> Positions:
        """Rotary positions of a whole prompt with its placeholders expanded; grids are [images, 3] and [videos, 3]."""

    def text_model(self, model: nn.Module) -> Any:
        """The language model (embedding, layers, norm) inside the loaded class."""
        return getattr(cast(Any, model).model, self.text_module)

    def embed(self, model: nn.Module, input_ids: torch.Tensor) -> torch.Tensor:
        """Token embeddings [tokens, width], before any image row is replaced."""
        return cast(torch.Tensor, self.text_model(model).embed_tokens(input_ids))

    def replace_image_rows(
        self, hidden: torch.Tensor, rows: torch.Tensor, image_embeds: torch.Tensor | None, sources: torch.Tensor
    ) -> torch.Tensor:
        """hidden [tokens, width] with image_embeds[sources] at `rows`; both row tensors are [image tokens]."""
        if image_embeds is None:
            raise WireError("tensor 'image_embeds' is missing: this family replaces the placeholder embeddings")
        return hidden.index_copy(0, rows, image_embeds.index_select(0, sources))

    def logits(self, model: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [rows, vocabulary] of final hidden states [rows, width]."""
        return cast(torch.Tensor, cast(Any, model).lm_head(self.text_model(model).norm(hidden)))

    def rotary(self, model: nn.Module, hidden: torch.Tensor, position_ids: torch.Tensor) -> Any:
        """A decoder layer's `position_embeddings` for hidden [1, tokens, width] and positions [axes, 1, tokens]."""
        return self.text_model(model).rotary_emb(hidden, position_ids)
