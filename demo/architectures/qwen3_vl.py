"""The Qwen3-VL demo checkpoint: 6 vision blocks and 6 decoder layers.

Deepstack features leave the vision tower after blocks 1, 3 and 5 and enter after decoder layers 0, 1 and 2, so three
more layers work on what they brought. All of them are under test.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from demo.architectures.base import Architecture, without_dtype
from demo.architectures.qwen3_vl_training import MERGE, PATCH_PX, TABLE_SIDE, Batch, collate, training_loss
from demo.learner import Probes
from demo.lessons import Lesson
from demo.pictures import MAX_PIXELS, MIN_PIXELS, SIZE_JITTER_PX, SIZES
from demo.tokenizer import ChatFormat, token_id, vocabulary_size

DEEPSTACK_BLOCKS = (1, 3, 5)
CHAT = ChatFormat(
    special_tokens=(
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<|object_ref_start|>",
        "<|object_ref_end|>",
        "<|box_start|>",
        "<|box_end|>",
        "<|quad_start|>",
        "<|quad_end|>",
        "<|vision_start|>",
        "<|vision_end|>",
        "<|vision_pad|>",
        "<|image_pad|>",
        "<|video_pad|>",
    ),
    image_token="<|image_pad|>",
    image_part="<|vision_start|><|image_pad|><|vision_end|>",
    role_start="<|im_start|>",
    role_end="\n",
    turn_end="<|im_end|>",
    padding="<|endoftext|>",
    template=Path(__file__).with_name("qwen3_vl.jinja"),
    settings={
        "video_token": "<|video_pad|>",
        "vision_bos_token": "<|vision_start|>",
        "vision_eos_token": "<|vision_end|>",
    },
)
WIDTH = 192
TEXT = {
    "model_type": "qwen3_vl_text",
    "hidden_size": WIDTH,
    "intermediate_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.05,
    "max_position_embeddings": 4096,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [6, 5, 5],
        "mrope_interleaved": True,
    },
}
VISION = {
    "model_type": "qwen3_vl_vision",
    "depth": 6,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_heads": 4,
    "hidden_act": "gelu_pytorch_tanh",
    "in_channels": 3,
    "patch_size": PATCH_PX,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": 2,
    "out_hidden_size": WIDTH,
    "num_position_embeddings": TABLE_SIDE**2,
    "deepstack_visual_indexes": list(DEEPSTACK_BLOCKS),
    "initializer_range": 0.05,
    "dtype": "bfloat16",
}


class Qwen3VL(Architecture):
    """Every deepstack feature is under test; the main image embeddings are the other path."""

    family: ClassVar[str] = "qwen"
    model_type: ClassVar[str] = "qwen3_vl"
    chat: ClassVar[ChatFormat] = CHAT
    end_tokens: ClassVar[tuple[str, ...]] = ("<|im_end|>", "<|endoftext|>")
    probed: ClassVar[int] = len(DEEPSTACK_BLOCKS)
    width: ClassVar[int] = WIDTH
    jitter_px: ClassVar[int] = SIZE_JITTER_PX

    def config_values(self, tokenizer: Tokenizer) -> dict[str, Any]:
        ends = {
            "eos_token_id": token_id(tokenizer, "<|im_end|>"),
            "pad_token_id": token_id(tokenizer, "<|endoftext|>"),
        }
        return {
            "architectures": ["Qwen3VLForConditionalGeneration"],
            "model_type": "qwen3_vl",
            "dtype": "bfloat16",
            "tie_word_embeddings": True,
            "image_token_id": token_id(tokenizer, "<|image_pad|>"),
            "video_token_id": token_id(tokenizer, "<|video_pad|>"),
            "vision_start_token_id": token_id(tokenizer, "<|vision_start|>"),
            "vision_end_token_id": token_id(tokenizer, "<|vision_end|>"),
            "text_config": {**TEXT, "vocab_size": vocabulary_size(tokenizer), **ends},
            "vision_config": VISION,
        }

    def processor_files(self) -> Mapping[str, Mapping[str, Any]]:
        return {
            "preprocessor_config.json": {"image_processor_type": "Qwen2VLImageProcessorFast", **_pixel_rules()},
            "video_preprocessor_config.json": {"video_processor_type": "Qwen3VLVideoProcessor", **_pixel_rules(8)},
        }

    def build_model(self, tokenizer: Tokenizer) -> Any:
        return Qwen3VLForConditionalGeneration(Qwen3VLConfig(**without_dtype(self.config_values(tokenizer))))

    def batch_size_px(self, random: np.random.Generator) -> tuple[int, int]:
        return SIZES[int(random.integers(len(SIZES)))]

    def collate(self, tokenizer: Tokenizer, lessons: list[Lesson], size: tuple[int, int]) -> Batch:
        return collate(tokenizer, self.chat, lessons, size)

    def losses(self, model: Any, probes: Probes, batch: Any) -> Tensor:
        return training_loss(model, probes, batch)

    def token_counts(self, pixels: Mapping[str, Tensor]) -> Sequence[int]:
        counts: list[int] = (pixels["image_grid_thw"].prod(-1) // MERGE**2).tolist()
        return counts

    def generation_inputs(self, model: Any, input_ids: Tensor) -> Mapping[str, Tensor]:
        return {"mm_token_type_ids": (input_ids == model.config.image_token_id).int()}

    @contextmanager
    def zeroed_features(self, model: Any) -> Iterator[None]:
        def zero(_module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            features = keywords.get("deepstack_visual_embeds")
            zeroed = None if features is None else [torch.zeros_like(level) for level in features]
            return arguments, {**keywords, "deepstack_visual_embeds": zeroed}

        handle = model.model.language_model.register_forward_pre_hook(zero, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def feature_outputs(self, config: Mapping[str, Any], weights: Iterable[str]) -> list[str]:
        return [name for name in weights if "deepstack_merger_list" in name and "linear_fc2" in name]


def _pixel_rules(frames: int = 1) -> dict[str, Any]:
    """A video's limits count the pixels of all its frames."""
    return {
        "patch_size": PATCH_PX,
        "temporal_patch_size": 2,
        "merge_size": MERGE,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "size": {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS * frames},
        "processor_class": "Qwen3VLProcessor",
    }
