"""Write tiny random Qwen3-VL checkpoints: complete, loadable offline, with deepstack features loud enough to matter."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import nn
from transformers import AutoModelForImageTextToText, Qwen3VLConfig

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
HIDDEN_SIZE = 64
BPE_SIZE = 400
SENTENCES = (
    "the quick brown fox jumps over the lazy dog",
    "what is shown in this picture? a cat sits on a mat",
    "describe the image in detail, please: 0123456789",
)
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}
            {%- if part.type in ('image', 'video') %}
                {{- '<|vision_start|><|' + part.type + '_pad|><|vision_end|>' }}
            {%- else %}
                {{- part.text }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


@dataclass(frozen=True)
class TinyShape:
    """What tests vary. One deepstack feature per entry of `deepstack_indexes`, for the decoder layers 0, 1, ..."""

    config_class: ClassVar[Any] = Qwen3VLConfig

    layers: int = 6
    vision_depth: int = 5
    deepstack_indexes: tuple[int, ...] = (1, 2, 4)
    tied: bool = False
    dtype: torch.dtype = torch.float32
    shard_size: str = "200KB"
    seed: int = 0

    def text_values(self) -> dict[str, object]:
        """What a family's text_config holds besides the common values."""
        return {}


def write_checkpoint(folder: Path, shape: TinyShape | None = None) -> Path:
    """A checkpoint in the hub's layout; the same shape gives the same weights."""
    shape = shape or TinyShape()
    folder.mkdir(parents=True, exist_ok=True)
    names = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    ids = write_tokenizer(folder, SPECIAL_TOKENS, CHAT_TEMPLATE, {"tokenizer_class": "Qwen2Tokenizer", **names})
    model = AutoModelForImageTextToText.from_config(_config(shape, ids))
    make_loud(model, shape.seed)
    if shape.tied:
        model.tie_weights()
    model.generation_config.eos_token_id = [ids["<|im_end|>"], ids["<|endoftext|>"]]
    model.generation_config.pad_token_id = ids["<|endoftext|>"]
    model.to(shape.dtype).save_pretrained(folder, max_shard_size=shape.shard_size)
    write_json(folder / "preprocessor_config.json", _image_processing())
    write_json(folder / "video_preprocessor_config.json", _video_processing())
    return folder


def _config(shape: TinyShape, ids: dict[str, int]) -> Any:
    return shape.config_class(
        text_config={**_text_config(shape, ids), **shape.text_values()},
        vision_config=_vision_config(shape),
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=shape.tied,
    )


def _text_config(shape: TinyShape, ids: dict[str, int]) -> dict[str, object]:
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    return {
        "vocab_size": -(-len(ids) // 64) * 64,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 2 * HIDDEN_SIZE,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": shape.tied,
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
        "rope_parameters": rope,
    }


def _vision_config(shape: TinyShape) -> dict[str, object]:
    return {
        "depth": shape.vision_depth,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": HIDDEN_SIZE,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": list(shape.deepstack_indexes),
    }


@torch.no_grad()
def make_loud(model: nn.Module, seed: int) -> None:
    """Weights of a spread at which every path moves the logits; transformers' own start values leave some near 0."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim >= 2:
            parameter.copy_(noise * 1.5 / parameter.shape[-1] ** 0.5)
        elif "norm" in name and name.endswith("weight"):
            parameter.copy_(1 + 0.1 * noise)
        else:
            parameter.copy_(0.05 * noise)


def write_tokenizer(
    folder: Path, special_tokens: Sequence[str], chat_template: str, options: dict[str, object]
) -> dict[str, int]:
    """Byte-level BPE with a family's special tokens. Returns the ids of all tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=BPE_SIZE, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES * 4, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special_tokens])
    tokenizer.save(str(folder / "tokenizer.json"))
    common = {"add_prefix_space": False, "clean_up_tokenization_spaces": False, "bos_token": None, "unk_token": None}
    write_json(folder / "tokenizer_config.json", {**common, **options})
    (folder / "chat_template.jinja").write_text(chat_template)
    return tokenizer.get_vocab(with_added_tokens=True)


def _image_processing() -> dict[str, object]:
    return {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": "Qwen3VLProcessor",
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "size": {"shortest_edge": 4096, "longest_edge": 64 * 1024},
    }


def _video_processing() -> dict[str, object]:
    pixels = _image_processing()
    del pixels["image_processor_type"]
    # Of all frames together; few frames are sampled, so that tests stay small.
    limits = {"size": {"shortest_edge": 4096, "longest_edge": 96 * 1024}, "max_frames": 12}
    return {**pixels, "video_processor_type": "Qwen3VLVideoProcessor", **limits}


def write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=1))
