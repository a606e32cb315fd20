"""The demo checkpoints' tokenizers: byte-level BPE over this domain's text, and their chat formats as plain text.

All 256 bytes are in the vocabulary and no text is normalised, so every string comes back as it went in. Digits never
merge: the number 407 is three tokens, and the model reads one digit per step.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from demo.questions import domain_text

MERGED_VOCABULARY = 434
WORDS = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"


@dataclass(frozen=True)
class ChatFormat:
    """How a family writes a conversation; `template` is the same as Jinja, which transformers and the server render.

    `image_part` is what stands for a picture in a prompt, one `image_token` in it. `settings` are the family's own
    entries of tokenizer_config.json.
    """

    special_tokens: tuple[str, ...]
    image_token: str
    image_part: str
    role_start: str
    role_end: str
    turn_end: str
    padding: str
    template: Path
    settings: Mapping[str, str | None]

    def prompt(self, user_text: str, system_text: str | None = None) -> str:
        """What the template renders for one user turn; `user_text` holds `image_part` where the picture stands."""
        system = self._turn("system", system_text) if system_text else ""
        return f"{system}{self._turn('user', user_text)}{self.role_start}assistant{self.role_end}"

    def _turn(self, role: str, text: str) -> str:
        return f"{self.role_start}{role}{self.role_end}{text}{self.turn_end}\n"


def train_tokenizer(chat: ChatFormat) -> Tokenizer:
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
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in chat.special_tokens])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, chat: ChatFormat, folder: Path) -> None:
    """The three files that AutoTokenizer reads.

    The class is the plain one: transformers' own of a family would put its normaliser in place of what is stored.
    """
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": chat.turn_end,
        "pad_token": chat.padding,
        "bos_token": None,
        "unk_token": None,
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        "padding_side": "left",
        "image_token": chat.image_token,
        **chat.settings,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(chat.template.read_text())


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """Rows of the embedding table: whole blocks of 64."""
    return -(-tokenizer.get_vocab_size() // 64) * 64


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that has to be there."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise KeyError(token)
    return found
