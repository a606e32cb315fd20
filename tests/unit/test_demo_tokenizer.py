"""The demo's tokenizer gives back every text and speaks the chat format; the stored files are what the code makes."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoTokenizer

from demo.evaluate import CHECKPOINT
from demo.tokenizer import IMAGE_PART, SPECIAL_TOKENS, prompt_text, train_tokenizer

TEXTS = [
    "The number is 40731.",
    "  two  spaces\tand\r\nlines \n",
    "e\u0301 is not \u00e9; \u212b is not \u00c5",
    "图片里有什么 ข้อความ नमस्ते",
    "👩\u200d👩\u200d👧 \U0001d54f \u0000\u200b\ufeff",
]


@pytest.fixture(scope="module")
def stored() -> Any:
    return AutoTokenizer.from_pretrained(CHECKPOINT)


@pytest.mark.parametrize("text", TEXTS)
def test_every_text_comes_back_as_it_went_in(stored: Any, text: str) -> None:
    assert stored.decode(stored(text)["input_ids"]) == text


def test_every_code_point_comes_back(stored: Any) -> None:
    text = "".join(chr(code) for code in range(0x20000) if not 0xD800 <= code < 0xE000)
    assert stored.decode(stored(text)["input_ids"]) == text


def test_digits_stay_apart(stored: Any) -> None:
    assert stored.tokenize("is 4077")[-4:] == ["4", "0", "7", "7"]


@pytest.mark.parametrize("token", SPECIAL_TOKENS)
def test_a_special_token_is_one_token(stored: Any, token: str) -> None:
    assert stored(token)["input_ids"] == [stored.convert_tokens_to_ids(token)]


def test_the_stored_tokenizer_is_the_one_that_training_makes() -> None:
    assert (CHECKPOINT / "tokenizer.json").read_text() == train_tokenizer().to_str(pretty=True)


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_the_template_renders_what_training_used(stored: Any, system: str | None) -> None:
    user = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Read it."}]}
    messages = [{"role": "system", "content": system}, user] if system else [user]
    rendered = stored.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == prompt_text(f"{IMAGE_PART}Read it.", system)


def test_the_template_renders_a_video_and_earlier_turns(stored: Any) -> None:
    messages = [
        {"role": "user", "content": [{"type": "video"}]},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Sure?"},
    ]
    rendered = stored.apply_chat_template(messages, tokenize=False)
    assert rendered == (
        "<|im_start|>user\n<|vision_start|><|video_pad|><|vision_end|><|im_end|>\n"
        "<|im_start|>assistant\nYes.<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n"
    )
