"""The demo checkpoint's shape, and the folder that plain `from_pretrained` loads.

Qwen3-VL with 6 vision blocks and 6 decoder layers. Deepstack features leave the vision tower after blocks 1, 3 and 5
and enter after decoder layers 0, 1 and 2, so three more layers work on what they brought.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import nn
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from demo.cells import MERGE, PATCH_PX, TABLE_SIDE
from demo.pictures import MAX_PIXELS, MIN_PIXELS
from demo.tokenizer import save_tokenizer

WIDTH = 192
DEEPSTACK_BLOCKS = (1, 3, 5)
STORED_DTYPE = torch.bfloat16


def config_values(tokenizer: Tokenizer) -> dict[str, Any]:
    """config.json: written out by hand, so that it does not depend on the transformers version that trained."""
    identifier = tokenizer.token_to_id
    vocabulary = -(-tokenizer.get_vocab_size() // 64) * 64
    text = {
        "model_type": "qwen3_vl_text",
        "vocab_size": vocabulary,
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
        "eos_token_id": identifier("<|im_end|>"),
        "pad_token_id": identifier("<|endoftext|>"),
        "dtype": "bfloat16",
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
    }
    vision = {
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
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "dtype": "bfloat16",
        "tie_word_embeddings": True,
        "image_token_id": identifier("<|image_pad|>"),
        "video_token_id": identifier("<|video_pad|>"),
        "vision_start_token_id": identifier("<|vision_start|>"),
        "vision_end_token_id": identifier("<|vision_end|>"),
        "text_config": text,
        "vision_config": vision,
    }


def build_model(tokenizer: Tokenizer) -> Qwen3VLForConditionalGeneration:
    """Fresh fp32 weights; the caller has seeded torch."""
    values = config_values(tokenizer)
    for part in (values, values["text_config"], values["vision_config"]):
        part.pop("dtype")
    return Qwen3VLForConditionalGeneration(Qwen3VLConfig(**values))


def save_checkpoint(model: nn.Module, tokenizer: Tokenizer, folder: Path) -> None:
    """Every file of the folder but training.json."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: value.detach().to("cpu", STORED_DTYPE).contiguous()
        for name, value in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    save_tokenizer(tokenizer, folder)
    end, padding = tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")
    generation = {"do_sample": False, "eos_token_id": [end, padding], "pad_token_id": padding}
    _write(folder / "config.json", config_values(tokenizer))
    _write(folder / "generation_config.json", generation)
    _write(folder / "preprocessor_config.json", {"image_processor_type": "Qwen2VLImageProcessorFast", **_pixel_rules()})
    _write(
        folder / "video_preprocessor_config.json", {"video_processor_type": "Qwen3VLVideoProcessor", **_pixel_rules(8)}
    )


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


def _write(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")
