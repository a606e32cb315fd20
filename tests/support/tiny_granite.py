"""Write tiny random Granite 4 Vision checkpoints: complete, loadable offline, in the hub's layout of files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForImageTextToText, Granite4VisionConfig

from tests.support.tiny import HIDDEN_SIZE, make_loud, write_json, write_tokenizer

SPECIAL_TOKENS = ("<|end_of_text|>", "<|pad|>", "<|start_of_role|>", "<|end_of_role|>", "<image>")
IMAGE_SIZE = 64
PINPOINTS = [[64, 64], [64, 128], [128, 64], [128, 128], [64, 192], [192, 64]]
CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|start_of_role|>' + message.role + '<|end_of_role|>' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}
            {{- '<image>' if part.type == 'image' else part.text }}
        {%- endfor %}
    {%- endif %}
    {{- '<|end_of_text|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_of_role|>assistant<|end_of_role|>' }}
{%- endif %}
"""


@dataclass(frozen=True)
class TinyGraniteShape:
    """What tests vary. `levels` maps vision layers to decoder layers, `spatial` names the layers of the four groups."""

    layers: int = 8
    levels: tuple[tuple[int, int], ...] = ((-4, 2), (-2, 1), (-1, 0))
    spatial: tuple[int, ...] = (3, 4, 5, 6)
    tied: bool = False
    dtype: torch.dtype = torch.float32
    seed: int = 0


def write_granite_checkpoint(folder: Path, shape: TinyGraniteShape | None = None) -> Path:
    """The same shape gives the same weights."""
    shape = shape or TinyGraniteShape()
    folder.mkdir(parents=True, exist_ok=True)
    names: dict[str, object] = {"eos_token": "<|end_of_text|>", "pad_token": "<|pad|>"}
    ids = write_tokenizer(folder, SPECIAL_TOKENS, CHAT_TEMPLATE, {"tokenizer_class": "GPT2Tokenizer", **names})
    model = AutoModelForImageTextToText.from_config(_config(shape, ids))
    make_loud(model, shape.seed)
    _raise_features(model)
    if shape.tied:
        model.tie_weights()
    model.generation_config.eos_token_id = ids["<|end_of_text|>"]
    model.generation_config.pad_token_id = ids["<|pad|>"]
    model.to(shape.dtype).save_pretrained(folder, max_shard_size="300KB")
    write_json(folder / "preprocessor_config.json", _image_processing())
    write_json(folder / "processor_config.json", _processing())
    return folder


@torch.no_grad()
def _raise_features(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith("out_linear.weight"):
            parameter.mul_(2)


def _config(shape: TinyGraniteShape, ids: dict[str, int]) -> Granite4VisionConfig:
    return Granite4VisionConfig(
        text_config=_text_config(shape, ids),
        vision_config=_vision_config(),
        qformer_config=_qformer_config(),
        image_token_index=ids["<image>"],
        vision_feature_select_strategy="full",
        tie_word_embeddings=shape.tied,
        downsample_rate="4/8",
        deepstack_layer_map=[list(pair) for pair in shape.levels],
        spatial_vision_layer=-1,
        spatial_target_layers=list(shape.spatial),
        image_grid_pinpoints=PINPOINTS,
    )


def _text_config(shape: TinyGraniteShape, ids: dict[str, int]) -> dict[str, object]:
    return {
        "model_type": "granite4_vision_text",
        "vocab_size": -(-len(ids) // 64) * 64,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 2 * HIDDEN_SIZE,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": shape.tied,
        # Other than 1, and such that the last feature still moves the next token.
        "embedding_multiplier": 1.5,
        "logits_scaling": 0.5,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.3,
        "pad_token_id": ids["<|pad|>"],
        "bos_token_id": ids["<|end_of_text|>"],
        "eos_token_id": ids["<|end_of_text|>"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7},
    }


def _vision_config() -> dict[str, object]:
    return {
        "model_type": "siglip_vision_model",
        "hidden_size": 64,  # the projectors have a head for every 64
        "intermediate_size": 96,
        "num_hidden_layers": 5,
        "num_attention_heads": 2,
        "image_size": IMAGE_SIZE,
        "patch_size": 8,
    }


def _qformer_config() -> dict[str, object]:
    return {
        "model_type": "blip_2_qformer",
        "num_hidden_layers": 1,
        "intermediate_size": 96,
        "cross_attention_frequency": 1,
        "max_position_embeddings": 2048,
        "use_qformer_text_input": False,
        # transformers 5.17 does not derive these from the vision config.
        "hidden_size": 64,
        "encoder_hidden_size": 64,
        "num_attention_heads": 1,
    }


def _image_processing() -> dict[str, object]:
    side = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    return {
        "image_processor_type": "LlavaNextImageProcessor",
        "processor_class": "Granite4VisionProcessor",
        "image_grid_pinpoints": PINPOINTS,
        "size": side,
        "crop_size": side,
        "do_center_crop": False,
        "do_pad": True,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "resample": 3,
    }


def _processing() -> dict[str, object]:
    return {
        "processor_class": "Granite4VisionProcessor",
        "patch_size": 8,
        "image_token": "<image>",
        "vision_feature_select_strategy": "full",
        "num_additional_image_tokens": 0,
        "downsample_rate": "4/8",
    }
