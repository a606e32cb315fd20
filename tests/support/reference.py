"""What transformers itself makes of a question: its processor's token ids and positions, its unsplit model's answer."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, AutoTokenizer, Qwen3VLProcessor
from transformers.models.auto.image_processing_auto import AutoImageProcessor
from transformers.video_utils import VideoMetadata, read_video_pyav

from deepstack_serving.families.qwen3_vl_video import GridVideoProcessing
from tests.support.asking import NEW_TOKENS, TOP, Answer, Ask


class _Processor(Qwen3VLProcessor):  # type: ignore[misc]
    """Takes a video processor that works without torchvision; tests/parity/test_video_pixels.py tests its pixels."""

    def check_argument_for_proper_class(self, name: str, argument: object) -> object:
        return None if name == "video_processor" else super().check_argument_for_proper_class(name, argument)


_Processor.__name__ = Qwen3VLProcessor.__name__  # the base class looks its parts up by this name


@dataclass(frozen=True)
class Expected:
    """The prompt as transformers builds it: ids [tokens], positions [axes, tokens], and the delta of later tokens."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    delta: int


class Reference:
    """The whole checkpoint in one transformers model, and its processor with the PIL image backend."""

    def __init__(self, checkpoint: Path) -> None:
        self.model = AutoModelForImageTextToText.from_pretrained(checkpoint).eval()
        self._has_axes = hasattr(self.model.model, "get_rope_index")
        self.processor = _without_torchvision(checkpoint) if self._has_axes else _whole(checkpoint)
        self.model.generation_config.eos_token_id = None

    def inputs(self, ask: Ask) -> dict[str, torch.Tensor]:
        """What the model takes: the processor's output for one user turn."""
        prompt = self.processor.tokenizer.apply_chat_template(ask.messages, tokenize=False, add_generation_prompt=True)
        images = [Image.open(io.BytesIO(file)).convert("RGB") for file in ask.images]
        videos = [self.video(file, dict(ask.sampling)) for file in ask.videos]
        options: dict[str, Any] = {
            "videos": [frames for frames, _ in videos],
            "video_metadata": [metadata for _, metadata in videos],
            "do_sample_frames": False,
        }
        options = options if videos else {}
        return dict(self.processor(text=[prompt], images=images or None, return_tensors="pt", **options))

    def video(self, file: bytes, sampling: Mapping[str, float]) -> tuple[npt.NDArray[np.uint8], VideoMetadata]:
        """Frames as transformers' own reader takes them from a file by its processor's rule; a list of frames whole."""
        if file.startswith(b"{"):
            content = json.loads(file)
            pictures = [np.asarray(Image.open(io.BytesIO(base64.b64decode(text)))) for text in content["frames"]]
            indices = list(range(len(pictures)))
            return np.stack(pictures), VideoMetadata(len(pictures), fps=content["fps"], frames_indices=indices)
        rule = partial(
            self.processor.video_processor.sample_frames,
            num_frames=sampling.get("video_num_frames"),
            fps=sampling.get("video_fps"),
        )
        frames, metadata = read_video_pyav(io.BytesIO(file), rule)
        return frames, metadata

    def prompt(self, ask: Ask) -> Expected:
        """Ids and positions, as the model computes them from the processor's output."""
        inputs = self.inputs(ask)
        if not self._has_axes:
            return Expected(inputs["input_ids"][0], torch.arange(inputs["input_ids"].shape[1])[None], 0)
        positions, delta = self.model.model.get_rope_index(
            inputs["input_ids"],
            mm_token_type_ids=inputs["mm_token_type_ids"],
            image_grid_thw=inputs.get("image_grid_thw"),
            video_grid_thw=inputs.get("video_grid_thw"),
        )
        return Expected(inputs["input_ids"][0], positions[:, 0], int(delta[0]))

    @torch.inference_mode()
    def logprobs(self, ask: Ask) -> torch.Tensor:
        """Log-probabilities [tokens, vocabulary] at every token of the prompt, by one forward pass."""
        self._forget()
        logits: torch.Tensor = self.model(**self.inputs(ask)).logits[0]
        return logits.float().log_softmax(-1)

    def generate(self, ask: Ask, new_tokens: int = NEW_TOKENS) -> Answer:
        """Greedy, without an end."""
        self._forget()
        inputs = self.inputs(ask)
        result = self.model.generate(
            **inputs, max_new_tokens=new_tokens, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
        ids = result.sequences[0, inputs["input_ids"].shape[1] :]
        logprobs = torch.cat(result.logits).float().log_softmax(-1)
        best = logprobs.topk(TOP)
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return Answer(
            tuple(ids.tolist()),
            tuple(logprobs.gather(1, ids[:, None])[:, 0].tolist()),
            tuple(tuple(zip(*pair, strict=True)) for pair in pairs),
        )

    def _forget(self) -> None:
        if self._has_axes:  # the model keeps the last prompt's delta
            self.model.model.rope_deltas = None


def _without_torchvision(checkpoint: Path) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    return _Processor(
        image_processor=AutoImageProcessor.from_pretrained(checkpoint, backend="pil"),
        tokenizer=tokenizer,
        video_processor=GridVideoProcessing(checkpoint).processor,
        chat_template=tokenizer.chat_template,
    )


def _whole(checkpoint: Path) -> Any:
    return AutoProcessor.from_pretrained(checkpoint, backend="pil")
