"""Parse the `messages` input: chat JSON with text and image parts, into a conversation and its images in order."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from deepstack_serving.errors import InvalidRequestError

ROLES = ("system", "user", "assistant", "tool")
Conversation = list[dict[str, Any]]


def user_turn(text: str, image_count: int) -> Conversation:
    """One user message: the images first, then the text."""
    content: list[dict[str, str]] = [{"type": "image"} for _ in range(image_count)]
    return [{"role": "user", "content": [*content, {"type": "text", "text": text}]}]


def parse_messages(text: str, images: Sequence[bytes]) -> tuple[Conversation, list[bytes]]:
    """The conversation with bare image parts, and the images in the order of those parts.

    A part without data of its own takes the next of `images`. Raises InvalidRequestError naming the message and part.
    """
    remaining = iter(images)
    found: list[bytes] = []
    conversation = []
    for index, message in enumerate(_messages(text)):
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise InvalidRequestError(f"messages[{index}].role is {role!r}; allowed: {', '.join(ROLES)}")
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(parts, list):
            raise InvalidRequestError(f"messages[{index}].content must be a string or a list of parts")
        parsed = [
            _part(part, f"messages[{index}].content[{place}]", remaining, found) for place, part in enumerate(parts)
        ]
        conversation.append({"role": role, "content": content if isinstance(content, str) else parsed})
    unused = sum(1 for _ in remaining)
    if unused:
        raise InvalidRequestError(
            f"the input 'image' holds {len(images)} images, the messages have parts for {len(images) - unused} of them"
        )
    return conversation, found


def _messages(text: str) -> list[dict[str, Any]]:
    try:
        messages = json.loads(text)
    except (ValueError, RecursionError) as error:  # a number too long to read is a plain ValueError
        raise InvalidRequestError(f"the input 'messages' is not JSON: {error}") from error
    if not isinstance(messages, list) or not messages or not all(isinstance(item, dict) for item in messages):
        raise InvalidRequestError("the input 'messages' must be a JSON list of at least one message object")
    return messages


def _part(part: Any, place: str, remaining: Iterator[bytes], found: list[bytes]) -> dict[str, str]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text":
        if not isinstance(part.get("text"), str):
            raise InvalidRequestError(f"{place}.text must be a string")
        _encoded(part["text"], place)
        return {"type": "text", "text": part["text"]}
    if kind in ("image", "image_url"):
        found.append(_image(part, place, remaining))
        return {"type": "image"}
    raise InvalidRequestError(f"{place} must be an object with the type text, image or image_url, got {kind!r}")


def _image(part: dict[str, Any], place: str, remaining: Iterator[bytes]) -> bytes:
    payload = part.get("image", part.get("image_url"))
    if isinstance(payload, dict):
        payload = payload.get("url")
    if payload is None:
        image = next(remaining, None)
        if image is None:
            raise InvalidRequestError(
                f"{place} has no image: neither data of its own nor one left in the input 'image'"
            )
        return image
    if not isinstance(payload, str):
        raise InvalidRequestError(f"{place} must hold the image as base64 text or a data: URI")
    return _encoded(payload, place)


def _encoded(text: str, place: str) -> bytes:
    """JSON can hold half a surrogate pair, which is no text."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"{place} is not valid Unicode text: {error}") from error
