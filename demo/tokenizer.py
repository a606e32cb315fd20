"""The demo checkpoint's tokenizer: byte-level BPE over this domain's text, and the chat format as plain text.

All 256 bytes are in the vocabulary and no text is normalised, so every string comes back as it went in. Digits never
merge: the number 407 is three tokens, and the model reads one digit per step.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from demo.questions import domain_text

MERGED_VOCABULARY = 434
SPECIAL_TOKENS = (
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
)
IMAGE_PART = "<|vision_start|><|image_pad|><|vision_end|>"
TEMPLATE_FILE = Path(__file__).with_name("chat_template.jinja")
WORDS = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"


def train_tokenizer() -> Tokenizer:
    """Deterministic: the same text gives the same merges."""
    tokenizer = Tokenizer(models.BPE())
    splits = [
        pre_tokenizers.Split(Regex(WORDS), behavior="isolated", invert=False),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MERGED_VOCABULARY,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[],
        show_progress=False,
    )
    tokenizer.train_from_iterator(domain_text(), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """The three files that AutoTokenizer reads.

    The class is the plain one: transformers' Qwen2Tokenizer would put its own normaliser in place of what is stored.
    """
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "bos_token": None,
        "unk_token": None,
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        "padding_side": "left",
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "vision_bos_token": "<|vision_start|>",
        "vision_eos_token": "<|vision_end|>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(TEMPLATE_FILE.read_text())


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that has to be there."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise KeyError(token)
    return found


def prompt_text(user_text: str, system_text: str | None = None) -> str:
    """What the chat template renders for one user turn; `user_text` holds IMAGE_PART where the picture stands."""
    system = f"<|im_start|>system\n{system_text}<|im_end|>\n" if system_text else ""
    return f"{system}<|im_start|>user\n{user_text}<|im_end|>\n<|im_start|>assistant\n"
