"""Parse the `messages` input: chat JSON with text, image and video parts, into a conversation and its files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from deepstack_serving.errors import InvalidRequestError, shown
from deepstack_serving.media import frame_list

ROLES = ("system", "user", "assistant", "tool")
KINDS = ("image", "image_url", "video", "video_url")
Conversation = list[dict[str, Any]]


def user_turn(text: str, image_count: int, video_count: int = 0) -> Conversation:
    """One user message: the images first, then the videos, then the text."""
    content: list[dict[str, str]] = [{"type": "image"} for _ in range(image_count)]
    content += [{"type": "video"} for _ in range(video_count)]
    return [{"role": "user", "content": [*content, {"type": "text", "text": text}]}]


def text_bytes(conversation: Conversation) -> int:
    """UTF-8 bytes of all text of a conversation."""
    size = 0
    for content in (message["content"] for message in conversation):
        texts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
        size += sum(len(text.encode(errors="replace")) for text in texts)
    return size


class _Media:
    """The elements of one input, `image` or `video`, and those that the parts of the messages take, in order."""

    def __init__(self, kind: str, elements: Sequence[bytes]) -> None:
        self.kind, self.sent = kind, len(elements)
        self.remaining = iter(elements)
        self.found: list[bytes] = []

    def take_next(self, place: str) -> bytes:
        element = next(self.remaining, None)
        if element is None:
            raise InvalidRequestError(
                f"{place} has no {self.kind}: neither data of its own nor one left in the input '{self.kind}'"
            )
        return element

    def check_used_up(self) -> None:
        unused = sum(1 for _ in self.remaining)
        if unused:
            raise InvalidRequestError(
                f"the input '{self.kind}' holds {self.sent} {self.kind}s, the messages have parts for "
                f"{self.sent - unused} of them"
            )


def parse_messages(
    text: str, images: Sequence[bytes], videos: Sequence[bytes] = ()
) -> tuple[Conversation, list[bytes], list[bytes]]:
    """The conversation with bare image and video parts, and the images and the videos in the order of those parts.

    A part without data of its own takes the next of its input. Raises InvalidRequestError naming the message and part.
    """
    media = {kind: _Media(kind, elements) for kind, elements in (("image", images), ("video", videos))}
    conversation = []
    for index, message in enumerate(_messages(text)):
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise InvalidRequestError(f"messages[{index}].role is {shown(role)}; allowed: {', '.join(ROLES)}")
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(parts, list):
            raise InvalidRequestError(f"messages[{index}].content must be a string or a list of parts")
        parsed = [_part(part, f"messages[{index}].content[{place}]", media) for place, part in enumerate(parts)]
        conversation.append({"role": role, "content": content if isinstance(content, str) else parsed})
    for item in media.values():
        item.check_used_up()
    return conversation, media["image"].found, media["video"].found


def _messages(text: str) -> list[dict[str, Any]]:
    try:
        messages = json.loads(text)
    except (ValueError, RecursionError) as error:  # a number too long to read is a plain ValueError
        raise InvalidRequestError(f"the input 'messages' is not JSON: {error}") from error
    if not isinstance(messages, list) or not messages or not all(isinstance(item, dict) for item in messages):
        raise InvalidRequestError("the input 'messages' must be a JSON list of at least one message object")
    return messages


def _part(part: Any, place: str, media: Mapping[str, _Media]) -> dict[str, str]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text":
        if not isinstance(part.get("text"), str):
            raise InvalidRequestError(f"{place}.text must be a string")
        _encoded(part["text"], place)
        return {"type": "text", "text": part["text"]}
    if kind in KINDS:
        taker = media[kind.removesuffix("_url")]
        taker.found.append(_element(part, place, taker))
        return {"type": taker.kind}
    raise InvalidRequestError(f"{place} must be an object with the type text, {', '.join(KINDS)}, got {shown(kind)}")


def _element(part: dict[str, Any], place: str, media: _Media) -> bytes:
    payload = part.get(media.kind, part.get(f"{media.kind}_url"))
    if isinstance(payload, dict):
        payload = payload.get("url")
    if media.kind == "video":
        if isinstance(payload, list):
            return _frames(payload, part, place)
        if "fps" in part:
            raise InvalidRequestError(
                f"{place}.fps goes with a list of frames; for a file send 'video_fps' with the request"
            )
    if payload is None:
        return media.take_next(place)
    if not isinstance(payload, str):
        raise InvalidRequestError(f"{place} must hold the {media.kind} as base64 text or a data: URI")
    return _encoded(payload, place)


def _frames(frames: list[Any], part: dict[str, Any], place: str) -> bytes:
    """Frames that the client chose, as one element of the input 'video'."""
    if "fps" not in part:
        raise InvalidRequestError(f"{place}.fps is missing: a list of frames needs the frames a second")
    for frame in frames:
        if not isinstance(frame, str):
            raise InvalidRequestError(f"{place}.video must list image files as base64 text or data: URIs")
        _encoded(frame, place)
    return frame_list(frames, part["fps"])


def _encoded(text: str, place: str) -> bytes:
    """JSON can hold half a surrogate pair, which is no text."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"{place} is not valid Unicode text: {error}") from error
