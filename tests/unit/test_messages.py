"""Chat JSON: parts that are understood, images and videos in their order, refusals that name message and part."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from deepstack_serving.errors import InvalidRequestError
from deepstack_serving.prompt.messages import parse_messages, user_turn

TEXT = {"type": "text", "text": "hello"}


def parse(
    *parts: object, images: tuple[bytes, ...] = (), videos: tuple[bytes, ...] = ()
) -> tuple[Any, list[bytes], list[bytes]]:
    return parse_messages(json.dumps([{"role": "user", "content": list(parts)}]), images, videos)


def test_user_turn_puts_images_and_videos_before_the_text() -> None:
    assert [part["type"] for part in user_turn("hello", 2, 1)[0]["content"]] == ["image", "image", "video", "text"]


def test_plain_strings_stay_strings() -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    assert parse_messages(json.dumps(messages), ()) == (messages, [], [])


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": "QUJD"},
        {"type": "image_url", "image_url": "QUJD"},
        {"type": "image_url", "image_url": {"url": "QUJD"}},
    ],
)
def test_image_of_a_part_is_found(part: dict[str, object]) -> None:
    conversation, images, videos = parse(part, TEXT)
    assert (conversation[0]["content"], images, videos) == ([{"type": "image"}, TEXT], [b"QUJD"], [])


@pytest.mark.parametrize(
    ("part", "video"),
    [
        ({"type": "video", "video": "QUJD"}, b"QUJD"),
        ({"type": "video_url", "video_url": {"url": "QUJD"}}, b"QUJD"),
        ({"type": "video", "video": ["QQ==", "Qg=="], "fps": 2}, b'{"frames": ["QQ==", "Qg=="], "fps": 2}'),
    ],
)
def test_video_of_a_part_is_found(part: dict[str, object], video: bytes) -> None:
    conversation, images, videos = parse(part, TEXT)
    assert (conversation[0]["content"], images, videos) == ([{"type": "video"}, TEXT], [], [video])


def test_images_and_videos_are_taken_from_their_own_inputs() -> None:
    parts = [{"type": kind} for kind in ("video", "image", "video")]
    assert parse(*parts, images=(b"i",), videos=(b"1", b"2"))[1:] == ([b"i"], [b"1", b"2"])


def test_video_without_a_part_is_refused_with_both_counts() -> None:
    with pytest.raises(InvalidRequestError, match=r"'video' holds 2 videos.* for 1\b"):
        parse({"type": "video"}, videos=(b"1", b"2"))


def test_bare_image_parts_take_the_inputs_images_in_order() -> None:
    bare, own = {"type": "image"}, {"type": "image", "image": "b3du"}
    assert parse(bare, own, TEXT, bare, images=(b"first", b"second"))[1] == [b"first", b"b3du", b"second"]


def test_images_of_all_turns_count() -> None:
    turns = [{"role": role, "content": [{"type": "image"}]} for role in ("user", "assistant", "user")]
    assert parse_messages(json.dumps(turns), (b"1", b"2", b"3"))[1] == [b"1", b"2", b"3"]


def test_image_without_a_part_is_refused_with_both_counts() -> None:
    with pytest.raises(InvalidRequestError, match=r"'image' holds 3 images.* for 1\b"):
        parse({"type": "image"}, images=(b"1", b"2", b"3"))


@pytest.mark.parametrize(
    ("part", "text"),
    [
        ({"type": "image"}, "messages[0].content[1] has no image"),
        ({"type": "image", "image": 5}, "messages[0].content[1] must hold the image as base64"),
        ({"type": "image_url", "image_url": {"href": "x"}}, "messages[0].content[1] has no image"),
        ({"type": "text"}, "messages[0].content[1].text must be a string"),
        ({"type": "text", "text": ["x"]}, "messages[0].content[1].text must be a string"),
        ({"type": "video"}, "messages[0].content[1] has no video"),
        ({"type": "video", "video": 5}, "messages[0].content[1] must hold the video as base64"),
        ({"type": "video", "video": ["QQ=="]}, "messages[0].content[1].fps is missing"),
        ({"type": "video", "video": [5], "fps": 2}, "messages[0].content[1].video must list image files"),
        ({"type": "video", "video": "QQ==", "fps": 2}, "messages[0].content[1].fps goes with a list of frames"),
        ({"type": "audio"}, "an object with the type text, image, image_url, video, video_url, got 'audio'"),
        ({"type": ["text"]}, "messages[0].content[1] must be an object"),
        ({}, "messages[0].content[1] must be an object"),
        ("hello", "messages[0].content[1] must be an object"),
        (None, "messages[0].content[1] must be an object"),
    ],
)
def test_bad_part_is_refused_by_place(part: object, text: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(text)):
        parse(TEXT, part)


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([], "at least one message"),
        ({}, "a JSON list"),
        ("hello", "a JSON list"),
        ([1], "message object"),
        ([{"content": "x"}], "messages[0].role is None; allowed: system"),
        ([{"role": "robot", "content": "x"}], "messages[0].role is 'robot'"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role is ['user']"),
        ([{"role": "user"}], "messages[0].content must be a string or a list"),
        ([{"role": "user", "content": {"type": "text"}}], "messages[0].content must be a string or a list"),
    ],
)
def test_bad_message_is_refused_by_place(messages: object, text: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(text)):
        parse_messages(json.dumps(messages), ())


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000])
def test_what_is_not_json_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="not JSON"):
        parse_messages(text, ())


@pytest.mark.parametrize(
    "message", [{"role": "r" * 100_000, "content": "x"}, {"role": "user", "content": [{"type": "t" * 100_000}]}]
)
def test_refusal_repeats_little_of_what_was_sent(message: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError, match=r"\.\.\. \(100002 characters\)") as caught:
        parse_messages(json.dumps([message]), ())
    assert len(str(caught.value)) < 300
