"""One request as the orchestrator accepted it, and the parsing that gets it there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deepstack_serving.engine.sampling_parameters import SamplingParameters, parse_sampling
from deepstack_serving.errors import InvalidRequestError
from deepstack_serving.media import FPS, FRAME_COUNT, VideoSampling


@dataclass(frozen=True)
class OutputOptions:
    """Which outputs a client asked for, and whether it wants them piece by piece."""

    stream: bool = False
    echo_input: bool = False
    finish_reason: bool = False
    cumulative_logprob: bool = False
    logprobs: bool = False
    num_input_tokens: bool = False
    num_output_tokens: bool = False


@dataclass(frozen=True)
class AuditOptions:
    """What `deepstack audit` changes about one request: layers whose features are zeros, graphs left out.

    With `describe` nothing is generated: the answer says how the stages compute.
    """

    zeroed: tuple[int, ...] = ()
    eager: bool = False
    describe: bool = False


@dataclass(frozen=True)
class GenerationRequest:
    """`text` None means that `messages` was sent; `images` and `videos` are the elements of the inputs, undecoded."""

    text: str | None
    messages: str | None
    images: tuple[bytes, ...]
    raw_prompt: bool
    sampling: SamplingParameters
    output: OutputOptions = field(default_factory=OutputOptions)
    videos: tuple[bytes, ...] = ()
    video_sampling: VideoSampling = VideoSampling()
    audit: AuditOptions = AuditOptions()


def parse_request(
    inputs: Mapping[str, list[Any]], parameters: Mapping[str, Any], defaults: SamplingParameters
) -> GenerationRequest:
    """From the input tensors' elements, by name; inputs that were not sent are not in the mapping.

    Raises InvalidRequestError naming the input.
    """
    text, messages = _text(inputs, "text_input"), _text(inputs, "messages")
    if (text is None) == (messages is None):
        raise InvalidRequestError("send exactly one of 'text_input' and 'messages'")
    raw_prompt = _flag(inputs, "raw_prompt")
    if raw_prompt and text is None:
        raise InvalidRequestError("'raw_prompt' goes with 'text_input', not with 'messages'")
    sampling = parse_sampling(_text(inputs, "sampling_parameters"), parameters, defaults)
    output = _output_options(inputs, sampling)
    if output.echo_input and text is None:
        raise InvalidRequestError("'exclude_input_in_output' = false goes with 'text_input', not with 'messages'")
    images, videos = (tuple(inputs.get(name, ())) for name in ("image", "video"))
    return GenerationRequest(text, messages, images, raw_prompt, sampling, output, videos, _video_sampling(inputs))


def _output_options(inputs: Mapping[str, list[Any]], sampling: SamplingParameters) -> OutputOptions:
    stream, echo = _flag(inputs, "stream"), not _flag(inputs, "exclude_input_in_output", default=True)
    if stream and echo:
        raise InvalidRequestError("'exclude_input_in_output' = false does not go with 'stream' = true")
    names = ("finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens", "num_output_tokens")
    wanted = {name: _flag(inputs, f"return_{name}") for name in names}
    wanted["logprobs"] = wanted["logprobs"] or sampling.logprobs > 0
    return OutputOptions(stream, echo, **wanted)


def _video_sampling(inputs: Mapping[str, list[Any]]) -> VideoSampling:
    rules = {"video_fps": FPS, "video_num_frames": FRAME_COUNT}
    values: dict[str, Any] = {}
    for name, rule in rules.items():
        value = _single(inputs, name)
        try:
            values[name] = None if value is None else rule.parse(value)
        except ValueError as error:
            raise InvalidRequestError(f"the input {name!r} is {value!r}; allowed: {rule.allowed}") from error
    if None not in values.values():
        raise InvalidRequestError("'video_fps' and 'video_num_frames' exclude each other; send one of them")
    return VideoSampling(values["video_fps"], values["video_num_frames"])


def _single(inputs: Mapping[str, list[Any]], name: str) -> Any:
    values = inputs.get(name)
    if not values:
        return None
    if len(values) != 1:
        raise InvalidRequestError(f"the input {name!r} must hold one element, got {len(values)}")
    return values[0]


def _text(inputs: Mapping[str, list[Any]], name: str) -> str | None:
    value = _single(inputs, name)
    if value is None or isinstance(value, str):
        return value
    try:
        return bytes(value).decode()
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"the input {name!r} is not UTF-8 text: {error}") from error


def _flag(inputs: Mapping[str, list[Any]], name: str, default: bool = False) -> bool:
    value = _single(inputs, name)
    return default if value is None else bool(value)
