"""From ids to text: never half a character, nothing at or after a stop string, and the pieces join to the whole."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from deepstack_serving.engine.text_stream import TextStream

Split = Callable[[Tokenizer, str], list[int]]
TEXTS = (
    "hello the quick fox",
    "naïve café",
    "日本語のテキスト",
    "🦊🦊 fox",
    "👩‍👩‍👧 family",
    " leading",
    "a\n\n  b\t",
    "é̂ combined",
)


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer.from_file(str(checkpoint / "tokenizer.json"))


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def bytewise(tokenizer: Tokenizer, text: str) -> list[int]:
    """One token per byte."""
    return [id_of(tokenizer, token) for piece in tokenizer.encode(text).tokens for token in piece]


def id_of(tokenizer: Tokenizer, token: str) -> int:
    return tokenizer.get_vocab(with_added_tokens=True)[token]


def stream(tokenizer: Tokenizer, ids: list[int], *stop: str) -> list[str]:
    """The pieces until a stop string is found, the flushed rest as the last."""
    made, pieces = TextStream(tokenizer, stop), []
    for token in ids:
        pieces.append(made.push(token))
        if made.stopped:
            return pieces
    return [*pieces, made.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_whole(tokenizer: Tokenizer, text: str) -> None:
    for ids in (ids_of(tokenizer, text), bytewise(tokenizer, text)):
        assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("text", TEXTS)
def test_no_piece_holds_half_a_character(tokenizer: Tokenizer, text: str) -> None:
    assert "\ufffd" not in "".join(stream(tokenizer, bytewise(tokenizer, text)))


def test_character_comes_with_its_last_byte(tokenizer: Tokenizer) -> None:
    assert stream(tokenizer, bytewise(tokenizer, "🦊")) == ["", "", "", "🦊", ""]


def test_character_that_stays_incomplete_is_flushed_as_it_decodes(tokenizer: Tokenizer) -> None:
    ids = bytewise(tokenizer, "a🦊")[:-1]
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


def test_invalid_bytes_in_the_middle_do_not_stop_the_stream(tokenizer: Tokenizer) -> None:
    ids = [*bytewise(tokenizer, "🦊")[:2], *ids_of(tokenizer, "hello"), *ids_of(tokenizer, " fox")]
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


def test_id_beyond_the_vocabulary_gives_no_text(tokenizer: Tokenizer) -> None:
    ids = [*ids_of(tokenizer, "fox"), tokenizer.get_vocab_size() + 5, *ids_of(tokenizer, " dog")]
    assert "".join(stream(tokenizer, ids)) == "fox dog"


def test_any_ids_stream_as_they_decode(tokenizer: Tokenizer) -> None:
    chance = random.Random(0)
    for length in range(1, 200):
        ids = [chance.randrange(tokenizer.get_vocab_size() + 5) for _ in range(length % 40 + 1)]
        assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


def test_special_tokens_give_no_text(tokenizer: Tokenizer) -> None:
    ids = [*ids_of(tokenizer, "fox"), id_of(tokenizer, "<|image_pad|>"), *ids_of(tokenizer, " dog")]
    assert "".join(stream(tokenizer, ids)) == "fox dog"


@pytest.mark.parametrize(
    ("text", "stop", "left"),
    [
        ("the quick fox", "quick", "the "),
        ("the quick fox", "uic", "the q"),
        ("the quick fox", "e qu", "th"),
        ("the quick fox", "the", ""),
        ("the quick fox", "t", ""),
        ("the quick fox", "x", "the quick fo"),
        ("a🦊b", "🦊", "a"),
        ("aaab", "aab", "a"),
    ],
)
@pytest.mark.parametrize("split", [ids_of, bytewise], ids=["tokens", "bytes"])
def test_text_ends_before_the_stop_string(tokenizer: Tokenizer, split: Split, text: str, stop: str, left: str) -> None:
    made = TextStream(tokenizer, [stop])
    pieces = [made.push(token) for token in split(tokenizer, text) if not made.stopped]
    assert ("".join(pieces), made.stopped) == (left, True)


def test_first_of_several_stop_strings_ends_the_text(tokenizer: Tokenizer) -> None:
    assert "".join(stream(tokenizer, bytewise(tokenizer, "the quick fox"), "fox", "qu", "uick")) == "the "


def test_stop_string_that_does_not_complete_is_released(tokenizer: Tokenizer) -> None:
    assert "".join(stream(tokenizer, bytewise(tokenizer, "the quill"), "quick")) == "the quill"


def test_start_of_a_stop_string_is_flushed_at_the_end(tokenizer: Tokenizer) -> None:
    pieces = stream(tokenizer, bytewise(tokenizer, "the qui"), "quick")
    assert (pieces[-1], "".join(pieces)) == ("qui", "the qui")


@pytest.mark.parametrize("stop", ["quick", "fox jumps over", "zzz"])
def test_held_back_text_is_shorter_than_the_longest_stop_string(tokenizer: Tokenizer, stop: str) -> None:
    text, made, sent = "the quick quiet fox jumps on", TextStream(tokenizer, [stop]), ""
    for count, token in enumerate(bytewise(tokenizer, text), 1):
        sent += made.push(token)
        if made.stopped:
            break
        assert count - len(sent) < len(stop)


def test_stop_string_completed_by_the_flushed_rest_is_found(tokenizer: Tokenizer) -> None:
    made = TextStream(tokenizer, ["a\ufffd"])
    pushed = [made.push(token) for token in bytewise(tokenizer, "xa🦊")[:3]]
    assert ("".join(pushed) + made.flush(), made.stopped) == ("x", True)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("count", [2, 3, 8])
def test_tokens_that_come_together_join_to_the_whole(tokenizer: Tokenizer, text: str, count: int) -> None:
    ids, made = bytewise(tokenizer, text), TextStream(tokenizer, [])
    pieces = [made.push_all(ids[place : place + count]) for place in range(0, len(ids), count)]
    assert "".join([*pieces, made.flush()]) == tokenizer.decode(ids)
    assert "\ufffd" not in "".join(pieces)


class CountingTokenizer:
    """Notes how many tokens it is asked to decode."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self.decoded = tokenizer, 0

    def decode(self, ids: list[int], **options: bool) -> str:
        self.decoded += len(ids)
        return str(self._tokenizer.decode(ids, **options))


def endless(tokenizer: Tokenizer, kind: str, length: int) -> list[int]:
    """Answers that a model without sense may give."""
    unknown = [tokenizer.get_vocab_size() + 5] * length
    lone = bytewise(tokenizer, "🦊")
    kinds = {
        "text": ids_of(tokenizer, "the quick fox ") * length,
        "first bytes": lone[:1] * length,
        "later bytes": lone[2:3] * length,
        "cut characters": lone[:3] * length,
        "no text": unknown,
        "special tokens": [id_of(tokenizer, "<|image_pad|>")] * length,
        "both": [*lone[:2], *unknown[:30], *lone[2:]] * length,
    }
    return kinds[kind][:length]


@pytest.mark.parametrize(
    "kind", ["text", "first bytes", "later bytes", "cut characters", "no text", "special tokens", "both"]
)
def test_token_of_a_long_answer_costs_as_much_as_one_of_a_short_one(tokenizer: Tokenizer, kind: str) -> None:
    costs = []
    for length in (200, 2000):
        counting = CountingTokenizer(tokenizer)
        made, ids = TextStream(counting, []), endless(tokenizer, kind, length)
        told = "".join(made.push(token) for token in ids)
        costs.append(counting.decoded / length)
        assert told + made.flush() == tokenizer.decode(ids)
    assert costs[1] < 1.2 * costs[0] < 40


def test_random_bytes_of_any_length_stream_as_they_decode(tokenizer: Tokenizer) -> None:
    chance = random.Random(1)
    parts = bytewise(tokenizer, "🦊é日a")
    for _ in range(200):
        ids = [chance.choice(parts) for _ in range(chance.randint(1, 120))]
        made = TextStream(tokenizer, [])
        told = "".join(made.push(token) for token in ids)
        assert told + made.flush() == tokenizer.decode(ids)
