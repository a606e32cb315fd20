"""The Granite 4 Vision demo checkpoint: 6 vision blocks, 8 decoder layers, windowed Q-Former projectors.

Features enter before decoder layers 0 and 2 from the shallow vision blocks 2 and 4, and before layers 4 to 7 from the
last block, one spatial group each. The default split is after half of the layers, so the four spatial groups cross the
border between the two language stages, and they are under test.
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
from transformers import Granite4VisionConfig, Granite4VisionForConditionalGeneration

from demo.architectures.base import Architecture, without_dtype
from demo.architectures.granite4_start import start_tower
from demo.architectures.granite4_tiles import PATCH_PX, PINPOINTS, TILE_PX, layout_of
from demo.architectures.granite4_vision_training import Batch, collate, make_fast, training_loss
from demo.learner import Probes
from demo.lessons import Lesson
from demo.pictures import choose_size
from demo.tokenizer import ChatFormat, token_id, vocabulary_size

WIDTH = 192
LAYERS = 8
BORDER = LAYERS // 2
VISION_WIDTH = 128
RATE = "4/8"
CHAT = ChatFormat(
    special_tokens=(
        "<|end_of_text|>",
        "<|pad|>",
        "<|unk|>",
        "<|start_of_role|>",
        "<|end_of_role|>",
        "<image>",
    ),
    image_token="<image>",
    image_part="<image>",
    role_start="<|start_of_role|>",
    role_end="<|end_of_role|>",
    turn_end="<|end_of_text|>",
    padding="<|pad|>",
    template=Path(__file__).with_name("granite4_vision.jinja"),
    settings={"bos_token": "<|end_of_text|>", "unk_token": "<|unk|>"},
)
TEXT = {
    "model_type": "granite4_vision_text",
    "hidden_size": WIDTH,
    "intermediate_size": 384,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.05,
    "max_position_embeddings": 4096,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.8,
    "attention_multiplier": 0.2,
    "logits_scaling": 0.5,
    "dtype": "bfloat16",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": VISION_WIDTH,
    "intermediate_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_channels": 3,
    "image_size": TILE_PX,
    "patch_size": PATCH_PX,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
    "attention_dropout": 0.0,
    "vision_use_head": False,
    "dtype": "bfloat16",
}
QFORMER = {
    "model_type": "blip_2_qformer",
    "hidden_size": VISION_WIDTH,
    "encoder_hidden_size": VISION_WIDTH,
    "num_attention_heads": VISION_WIDTH // 64,  # transformers takes 64 channels per head, whatever is written here
    "num_hidden_layers": 1,
    "intermediate_size": 256,
    "cross_attention_frequency": 1,
    "max_position_embeddings": 2048,
    "use_qformer_text_input": False,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "initializer_range": 0.05,
    "dtype": "bfloat16",
}
LAYER_MAP = ((2, 0), (4, 2))
SPATIAL_LAYERS = (4, 5, 6, 7)


class Granite4Vision(Architecture):
    """The features of the layers from BORDER on are under test; those of the earlier layers are the other path."""

    family: ClassVar[str] = "granite"
    model_type: ClassVar[str] = "granite4_vision"
    chat: ClassVar[ChatFormat] = CHAT
    end_tokens: ClassVar[tuple[str, ...]] = ("<|end_of_text|>",)
    probed: ClassVar[int] = len(SPATIAL_LAYERS)
    width: ClassVar[int] = WIDTH
    jitter_px: ClassVar[int] = 0

    def config_values(self, tokenizer: Tokenizer) -> dict[str, Any]:
        names = {"bos_token_id": "<|end_of_text|>", "eos_token_id": "<|end_of_text|>", "pad_token_id": "<|pad|>"}
        ids = {key: token_id(tokenizer, token) for key, token in names.items()}
        return {
            "architectures": ["Granite4VisionForConditionalGeneration"],
            "model_type": "granite4_vision",
            "dtype": "bfloat16",
            "tie_word_embeddings": True,
            "image_token_index": token_id(tokenizer, "<image>"),
            "image_grid_pinpoints": [list(size) for size in PINPOINTS],
            "vision_feature_select_strategy": "full",
            "downsample_rate": RATE,
            "deepstack_layer_map": [list(pair) for pair in LAYER_MAP],
            "spatial_vision_layer": -1,
            "spatial_target_layers": list(SPATIAL_LAYERS),
            "projector_dropout": 0.0,
            "text_config": {**TEXT, "vocab_size": vocabulary_size(tokenizer), **ids},
            "vision_config": VISION,
            "qformer_config": QFORMER,
        }

    def processor_files(self) -> Mapping[str, Mapping[str, Any]]:
        side = {"height": TILE_PX, "width": TILE_PX}
        images = {
            "image_processor_type": "LlavaNextImageProcessor",
            "processor_class": "Granite4VisionProcessor",
            "image_grid_pinpoints": [list(size) for size in PINPOINTS],
            "size": side,
            "crop_size": side,
            "do_center_crop": False,
            "do_pad": True,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "resample": 3,
        }
        whole = {
            "processor_class": "Granite4VisionProcessor",
            "patch_size": PATCH_PX,
            "image_token": "<image>",
            "vision_feature_select_strategy": "full",
            "num_additional_image_tokens": 0,
            "downsample_rate": RATE,
        }
        return {"preprocessor_config.json": images, "processor_config.json": whole}

    def build_model(self, tokenizer: Tokenizer) -> Any:
        config = Granite4VisionConfig(**without_dtype(self.config_values(tokenizer)))
        model = Granite4VisionForConditionalGeneration(config)
        start_tower(model.model.vision_tower)
        make_fast(model)
        return model

    def batch_size_px(self, random: np.random.Generator) -> tuple[int, int]:
        return choose_size(random)

    def collate(self, tokenizer: Tokenizer, lessons: list[Lesson], size: tuple[int, int]) -> Batch:
        return collate(tokenizer, self.chat, lessons, size)

    def losses(self, model: Any, probes: Probes, batch: Any) -> Tensor:
        return training_loss(model, probes, batch, BORDER)

    def token_counts(self, pixels: Mapping[str, Tensor]) -> Sequence[int]:
        return [len(layout_of(width, height).order) for height, width in pixels["image_sizes"].tolist()]

    def generation_inputs(self, model: Any, input_ids: Tensor) -> Mapping[str, Tensor]:
        return {}

    @contextmanager
    def zeroed_features(self, model: Any) -> Iterator[None]:
        def zero(_module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            features = keywords.get("deepstack_features")
            if features is not None:
                crossing = {layer: torch.zeros_like(rows) for layer, rows in features.items() if layer >= BORDER}
                keywords = {**keywords, "deepstack_features": {**features, **crossing}}
            return arguments, keywords

        handle = model.model.language_model.register_forward_pre_hook(zero, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def feature_outputs(self, config: Mapping[str, Any], weights: Iterable[str]) -> list[str]:
        """The newline vector, which every level shares and which is the same for every picture, stays."""
        layered = {f"layerwise_projectors.{i}": layer for i, (_, layer) in enumerate(config["deepstack_layer_map"])}
        spatial = {f"spatial_projectors.{i}": layer for i, layer in enumerate(config["spatial_target_layers"])}
        border = config["text_config"]["num_hidden_layers"] // 2
        crossing = [f"model.{name}.out_linear." for name, layer in {**layered, **spatial}.items() if layer >= border]
        return [name for name in weights if name.startswith(tuple(crossing))]
