"""What an architecture brings to the demo: its shape, its files, its batches and its forward pass in training."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from demo.folders import CHECKPOINTS
from demo.learner import Probes
from demo.lessons import Lesson
from demo.tokenizer import ChatFormat, save_tokenizer, token_id

STORED_DTYPE = torch.bfloat16


class Architecture(ABC):
    """One family's demo checkpoint. `probed` levels of `width` features have a probe each while training."""

    family: ClassVar[str]
    model_type: ClassVar[str]
    chat: ClassVar[ChatFormat]
    end_tokens: ClassVar[tuple[str, ...]]
    probed: ClassVar[int]
    width: ClassVar[int]
    jitter_px: ClassVar[int]

    @property
    def checkpoint(self) -> Path:
        """Where the committed checkpoint is."""
        return CHECKPOINTS[self.family]

    @abstractmethod
    def config_values(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """config.json: written out by hand, so that it does not depend on the transformers version that trained."""

    @abstractmethod
    def processor_files(self) -> Mapping[str, Mapping[str, Any]]:
        """Names and contents of the files that the image processing reads."""

    @abstractmethod
    def build_model(self, tokenizer: Tokenizer) -> Any:
        """Fresh fp32 weights; the caller has seeded torch."""

    @abstractmethod
    def batch_size_px(self, random: np.random.Generator) -> tuple[int, int]:
        """(width, height) of one batch's pictures; each may be `jitter_px` away from it."""

    @abstractmethod
    def collate(self, tokenizer: Tokenizer, lessons: list[Lesson], size: tuple[int, int]) -> tuple[Tensor, ...]:
        """A batch of this architecture's own kind."""

    @abstractmethod
    def losses(self, model: Any, probes: Probes, batch: Any) -> Tensor:
        """[answers' loss, probes' loss]."""

    @abstractmethod
    def token_counts(self, pixels: Mapping[str, Tensor]) -> Sequence[int]:
        """Image tokens of each picture that the image processor prepared."""

    @abstractmethod
    def generation_inputs(self, model: Any, input_ids: Tensor) -> Mapping[str, Tensor]:
        """What `generate` wants besides tokens and what the image processor gives."""

    @abstractmethod
    def zeroed_features(self, model: Any) -> AbstractContextManager[None]:
        """While this is open, the features under test are zero where they reach the language model."""

    @abstractmethod
    def feature_outputs(self, config: Mapping[str, Any], weights: Iterable[str]) -> list[str]:
        """Names of the weights whose zeros make the features under test zero; see control.py."""

    def save_checkpoint(self, model: nn.Module, tokenizer: Tokenizer, folder: Path) -> None:
        """Every file of the folder but training.json."""
        folder.mkdir(parents=True, exist_ok=True)
        weights = {
            name: value.detach().to("cpu", STORED_DTYPE).contiguous()
            for name, value in model.state_dict().items()
            if name != "lm_head.weight"
        }
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        save_tokenizer(tokenizer, self.chat, folder)
        ends = [token_id(tokenizer, token) for token in self.end_tokens]
        padding = token_id(tokenizer, self.chat.padding)
        generation = {"do_sample": False, "eos_token_id": ends, "pad_token_id": padding}
        _write(folder / "config.json", self.config_values(tokenizer))
        _write(folder / "generation_config.json", generation)
        for name, values in self.processor_files().items():
            _write(folder / name, values)


def without_dtype(values: Mapping[str, Any]) -> dict[str, Any]:
    """Config values for fresh fp32 weights."""
    kept = {name: value for name, value in values.items() if name != "dtype"}
    return {name: without_dtype(value) if isinstance(value, dict) else value for name, value in kept.items()}


def _write(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")
