"""A Qwen3-VL checkpoint of about 0.4 B parameters with random weights: right in size and shape, its text means nothing.

`python -m bench.checkpoint FOLDER` writes one; the CPU benchmark does so by itself.
"""

from __future__ import annotations

import argparse
import itertools
import json
import string
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from bench.serving import say

SEED = 20_260
VOCABULARY = 32_768
LAYERS = 20
WIDTH = 1024
_COMPLETE = "complete"
_SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
_CHAT_TEMPLATE = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content -%}
{%- if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif -%}
{%- endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def ensure_checkpoint(folder: Path) -> Path:
    """Write it unless it is there and whole; returns the folder."""
    if not (folder / _COMPLETE).exists():
        say(f"writing a random checkpoint to {folder} (0.8 GB, once) ...")
        folder.mkdir(parents=True, exist_ok=True)
        _write_checkpoint(folder)
        (folder / _COMPLETE).touch()
    return folder


def build_tokenizer(size: int = VOCABULARY, special: Sequence[str] = _SPECIAL) -> Tokenizer:
    """Byte-level BPE whose merges are strings of small letters, so that any id below `size` is text.

    Digits never merge: a text of n digits is n tokens. The special tokens have the last ids.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = list(itertools.islice(_merges(), size - len(alphabet) - len(special)))
    words = [*alphabet, *(left + right for left, right in merges)]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def config_values(tokenizer: Tokenizer, layers: int = LAYERS, width: int = WIDTH) -> dict[str, Any]:
    """Proportions of the smallest Qwen3 language model, with fewer layers and a smaller vocabulary."""
    text = {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 64,
        "num_key_value_heads": width // 128,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
        "pad_token_id": tokenizer.token_to_id("<|endoftext|>"),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5e6,
            "mrope_section": [24, 20, 20],
            "mrope_interleaved": True,
        },
    }
    vision = {
        "depth": 6,
        "hidden_size": width // 2,
        "intermediate_size": 2 * width,
        "num_heads": 8,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": width,
        "num_position_embeddings": 48 * 48,
        "deepstack_visual_indexes": [1, 3, 5],
    }
    return {
        "tie_word_embeddings": True,
        "image_token_id": tokenizer.token_to_id("<|image_pad|>"),
        "video_token_id": tokenizer.token_to_id("<|video_pad|>"),
        "vision_start_token_id": tokenizer.token_to_id("<|vision_start|>"),
        "vision_end_token_id": tokenizer.token_to_id("<|vision_end|>"),
        "text_config": text,
        "vision_config": vision,
    }


def _write_checkpoint(folder: Path) -> None:
    tokenizer = build_tokenizer()
    torch.manual_seed(SEED)
    model: Any = Qwen3VLForConditionalGeneration(Qwen3VLConfig(**config_values(tokenizer)))
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokens = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "image_token": "<|image_pad|>"}
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **tokens})
    (folder / "chat_template.jinja").write_text(_CHAT_TEMPLATE)
    pixels = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2, "size": _pixel_limits()}
    levels = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    write_json(
        folder / "preprocessor_config.json", {"image_processor_type": "Qwen2VLImageProcessorFast", **pixels, **levels}
    )
    end = tokenizer.token_to_id("<|im_end|>")
    write_json(folder / "generation_config.json", {"do_sample": False, "eos_token_id": [end]})


def _pixel_limits() -> dict[str, int]:
    return {"shortest_edge": 4 * 32 * 32, "longest_edge": 1024 * 32 * 32}


def write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")


def _merges() -> Iterator[tuple[str, str]]:
    letters = string.ascii_lowercase
    for size in (2, 3, 4):
        for word in itertools.product(letters, repeat=size):
            yield "".join(word[:-1]), word[-1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    ensure_checkpoint(parser.parse_args().folder)
