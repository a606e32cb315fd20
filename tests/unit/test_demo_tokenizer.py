"""The demo's tokenizer gives back every text and speaks the chat format; the stored files are what the code makes."""

from __future__ import annotations

from typing import Any

import pytest
from jinja2 import TemplateError
from transformers import AutoTokenizer

from demo.architectures import ARCHITECTURES
from demo.architectures.base import Architecture
from demo.tokenizer import save_tokenizer, train_tokenizer

QWEN = ARCHITECTURES["qwen"]

TEXTS = [
    "The number is 40731.",
    "  two  spaces\tand\r\nlines \n",
    "e\u0301 is not \u00e9; \u212b is not \u00c5",
    "图片里有什么 ข้อความ नमस्ते",
    "👩\u200d👩\u200d👧 \U0001d54f \u0000\u200b\ufeff",
]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def family(request: pytest.FixtureRequest) -> Architecture:
    return ARCHITECTURES[request.param]


@pytest.fixture(scope="module")
def saved(family: Architecture, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The tokenizer as transformers reads it from a checkpoint folder."""
    folder = tmp_path_factory.mktemp(family.family)
    save_tokenizer(train_tokenizer(family.chat), family.chat, folder)
    loading: Any = AutoTokenizer
    return loading.from_pretrained(folder)


@pytest.mark.parametrize("text", TEXTS)
def test_every_text_comes_back_as_it_went_in(saved: Any, text: str) -> None:
    assert saved.decode(saved(text)["input_ids"]) == text


def test_every_code_point_comes_back(saved: Any) -> None:
    text = "".join(chr(code) for code in range(0x20000) if not 0xD800 <= code < 0xE000)
    assert saved.decode(saved(text)["input_ids"]) == text


def test_digits_stay_apart(saved: Any) -> None:
    assert saved.tokenize("is 4077")[-4:] == ["4", "0", "7", "7"]


def test_a_special_token_is_one_token(family: Architecture, saved: Any) -> None:
    for token in family.chat.special_tokens:
        assert saved(token)["input_ids"] == [saved.convert_tokens_to_ids(token)]


def test_the_stored_tokenizer_is_the_one_that_training_makes() -> None:
    assert (QWEN.checkpoint / "tokenizer.json").read_text() == train_tokenizer(QWEN.chat).to_str(pretty=True)


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_the_template_renders_what_training_used(family: Architecture, saved: Any, system: str | None) -> None:
    user = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Read it."}]}
    messages = [{"role": "system", "content": system}, user] if system else [user]
    rendered = saved.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == family.chat.prompt(f"{family.chat.image_part}Read it.", system)


def test_the_template_renders_earlier_turns(family: Architecture, saved: Any) -> None:
    turns = [("user", "Read it."), ("assistant", "Yes."), ("user", "Sure?")]
    rendered = saved.apply_chat_template([{"role": role, "content": text} for role, text in turns], tokenize=False)
    chat = family.chat
    assert rendered == "".join(f"{chat.role_start}{role}{chat.role_end}{text}{chat.turn_end}\n" for role, text in turns)


def test_a_late_system_message_is_refused(saved: Any) -> None:
    messages = [{"role": "user", "content": "Read it."}, {"role": "system", "content": "Be brief."}]
    with pytest.raises(TemplateError, match="has to be the first"):
        saved.apply_chat_template(messages, tokenize=False)


def test_the_template_renders_a_video() -> None:
    loading: Any = AutoTokenizer
    messages = [{"role": "user", "content": [{"type": "video"}]}]
    rendered = loading.from_pretrained(QWEN.checkpoint).apply_chat_template(messages, tokenize=False)
    assert rendered == "<|im_start|>user\n<|vision_start|><|video_pad|><|vision_end|><|im_end|>\n"
