"""Building a request: a caller's arguments become the named inputs of the `orchestrator` model.

First station of a request's path. Both clients use it; the transports only serialise what it returns. Its only I/O is
reading image and video files. Values are judged only as far as the wire requires: the server knows its limits and names
them.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

from deepstack_client.errors import InvalidRequestError
from deepstack_client.images import ImageSource, load_image, load_images, to_base64
from deepstack_client.videos import VideoSource, load_videos

Message = Mapping[str, object]
"""One chat turn: {"role": ..., "content": text or a list of parts}."""

InputValue = bool | int | float | str | tuple[bytes, ...]
"""BOOL[1], INT32[1], FP32[1], BYTES[1] and BYTES[-1], in this order."""

_SAMPLING_KEYS = (
    "max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop", "logprobs", "ignore_eos",
)  # fmt: skip


class RequestOptions(TypedDict, total=False):
    """What `generate` and `stream` accept besides prompt and images; what is left out is the server's default."""

    max_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    seed: int | None
    stop: str | Sequence[str] | None
    logprobs: int | None
    """Number of alternatives per token; also turns on the log-probabilities of the answer."""
    ignore_eos: bool | None
    videos: Iterable[VideoSource]
    """Files or frames, in the order of the prompt; after the images where the prompt is a text."""
    video_fps: float | None
    """Frames a second to take of each video file; left out, the checkpoint's."""
    video_num_frames: int | None
    """Or so many frames of each."""
    parameters: Mapping[str, str]
    """Request parameters beside the inputs, for a server that knows them."""
    raw_prompt: bool
    """Use the prompt as it stands, without the chat template."""
    timeout_s: float | None
    """Limit for the whole request. Left out: the client's; None: no limit."""
    request_id: str


@dataclass(frozen=True)
class WireRequest:
    """One inference request, before serialisation. `inputs` holds only the inputs that are sent."""

    model: str
    request_id: str
    inputs: Mapping[str, InputValue]
    parameters: Mapping[str, str] = field(default_factory=dict)

    @property
    def stream(self) -> bool:
        return self.inputs.get("stream") is True


@dataclass(frozen=True)
class RequestFactory:
    """The defaults of one client: which model, and the time limit of requests that name none."""

    model: str
    timeout_s: float | None

    def build(
        self, prompt: str | Sequence[Message], images: Iterable[ImageSource], stream: bool, options: RequestOptions
    ) -> tuple[WireRequest, float | None]:
        """The request and its time limit in seconds."""
        unknown = options.keys() - RequestOptions.__annotations__.keys()
        if unknown:
            raise TypeError(f"unknown option: {', '.join(sorted(unknown))}")
        media = _image_inputs(images) | _video_inputs(options)
        inputs = _prompt_inputs(prompt) | media | _option_inputs(options) | {"stream": stream}
        request_id = _unicode(options.get("request_id") or uuid.uuid4().hex, "request_id")
        request = WireRequest(self.model, request_id, inputs, options.get("parameters", {}))
        return request, options.get("timeout_s", self.timeout_s)


def _prompt_inputs(prompt: str | Sequence[Message]) -> dict[str, InputValue]:
    if isinstance(prompt, str):
        return {"text_input": _unicode(prompt, "the prompt")}
    messages = [_plain_message(message) for message in prompt]
    if not messages:
        raise InvalidRequestError("messages is empty")
    return {"messages": _to_json(messages, "messages")}


def _plain_message(message: Message) -> dict[str, object]:
    if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
        raise InvalidRequestError(f"a message needs 'role' and 'content': {message!r}")
    content = message["content"]
    if isinstance(content, str):
        return dict(message)
    if not isinstance(content, Sequence):
        raise InvalidRequestError(f"content must be a text or a list of parts, not {type(content).__name__}")
    return {**message, "content": [_plain_part(part) for part in content]}


def _plain_part(part: object) -> object:
    """A part as JSON can carry it: bytes or a Path of a file become base64 text, everything else stays."""
    if not isinstance(part, Mapping):
        return part
    return {**part, **{kind: _plain_file(part[kind], kind) for kind in ("image", "video") if kind in part}}


def _plain_file(source: object, kind: str) -> object:
    if isinstance(source, list | tuple):  # frames
        return [_plain_file(frame, "image") for frame in source]
    return to_base64(load_image(source, kind)) if isinstance(source, bytes | os.PathLike) else source


def _image_inputs(images: Iterable[ImageSource]) -> dict[str, InputValue]:
    contents = load_images(images)
    return {"image": contents} if contents else {}


def _video_inputs(options: RequestOptions) -> dict[str, InputValue]:
    inputs: dict[str, InputValue] = {}
    contents = load_videos(options.get("videos", ()))
    fps, count = options.get("video_fps"), options.get("video_num_frames")
    if contents:
        inputs["video"] = contents
    if fps is not None:
        inputs["video_fps"] = float(fps)
    if count is not None:
        if not 1 <= int(count) < 2**31:
            raise InvalidRequestError(f"video_num_frames is {count}; allowed: 1 to {2**31 - 1}")
        inputs["video_num_frames"] = int(count)
    return inputs


def _option_inputs(options: RequestOptions) -> dict[str, InputValue]:
    sampling = {key: options.get(key) for key in _SAMPLING_KEYS if options.get(key) is not None}
    wants_logprobs = "logprobs" in sampling
    inputs: dict[str, InputValue] = {
        "sampling_parameters": _to_json(sampling, "sampling parameters"),
        "exclude_input_in_output": True,
        "return_finish_reason": True,
        "return_num_input_tokens": True,
        "return_num_output_tokens": True,
        "return_cumulative_logprob": wants_logprobs,
        "return_logprobs": wants_logprobs,
    }
    if options.get("raw_prompt"):
        inputs["raw_prompt"] = True
    return inputs


def _to_json(value: object, name: str) -> str:
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"{name} cannot be written as JSON: {error}") from error
    return _unicode(text, name)


def _unicode(text: str, name: str) -> str:
    """The text, unless it holds half a surrogate pair, which no transport can carry."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"{name} is not valid Unicode text: {error}") from error
    return text
