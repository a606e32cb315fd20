"""Requests that cannot be served: each gets a clear error as its only response, and the server goes on."""

from __future__ import annotations

import base64
import contextlib
import json
import struct
import zlib
from typing import Any

import pytest

from deepstack_serving.embedded import EmbeddedServer
from tests.support.asking import picture
from tests.support.raw_client import Inputs, Stream, ask, connect, generate, infer_message, post, refusal, request

PICTURE = picture(64, 64, 5)
LIMIT = 4096


def png_header(width: int, height: int) -> bytes:
    """A PNG file that promises more pixels than it has."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    return b"\x89PNG\r\n\x1a\n" + chunk + b"\x00\x00\x00\x00IDAT\x35\xaf\x06\x1e"


def user(*parts: Any) -> str:
    return json.dumps([{"role": "user", "content": list(parts)}])


IMAGES = {
    "junk": (b"\x00\x01\x02 this is no picture", "base64"),
    "empty": (b"", "empty"),
    "signature alone": (PICTURE[:8], "cannot be read"),
    "cut in its header": (PICTURE[:20], "damaged"),
    "promises 30000 x 30000": (png_header(30_000, 30_000), "the limit"),
    "wrong base64": (base64.b64encode(PICTURE)[:-3] + b"*==", "base64"),
    "base64 of junk": (base64.b64encode(b"this is no picture"), "cannot be read"),
    "address": (b"http://169.254.169.254/latest/meta-data", "never fetched"),
    "file address": (b"file:///etc/passwd", "never fetched"),
    "text": ("data:text/plain;base64,aGVsbG8=", "data:text/plain"),
    "too many bytes": (PICTURE + bytes(1 << 20), "the limit is 1048576"),
    "no side": (png_header(0, 10), "image"),
    "300 times as long as wide": (picture(900, 3), "image"),
}


@pytest.mark.parametrize(("image", "reason"), IMAGES.values(), ids=IMAGES)
def test_bad_image_is_refused_with_its_number(server: EmbeddedServer, image: bytes, reason: str) -> None:
    text = refusal(server, request("what is shown?", [PICTURE, image]))
    assert text.startswith("[INVALID_ARG] image[1]: ")
    assert reason in text


def test_image_cut_in_its_pixels_is_refused(server: EmbeddedServer) -> None:
    text = refusal(server, request("what is shown?", [PICTURE, PICTURE[: len(PICTURE) // 2]], stream=True))
    assert text.startswith("[INVALID_ARG]")
    assert "image[1]" in text
    assert "damaged or cut short" in text


PROMPTS: dict[str, tuple[dict[str, Any], str]] = {
    "text and messages": (request("hello", messages=user()), "exactly one of"),
    "neither": (request(), "exactly one of"),
    "text is not UTF-8": ({**request(), "text_input": [b"\xff\xfe"]}, "text_input"),
    "messages are no JSON": (request(messages="[{"), "messages"),
    "messages are no list": (request(messages='{"role": "user"}'), "messages"),
    "messages are empty": (request(messages="[]"), "messages"),
    "messages are nested too deep": (request(messages="[" * 100_000), "messages"),
    "number beyond reading in messages": (request(messages='[{"role": ' + "1" * 5000 + "}]"), "messages"),
    "half a surrogate pair in messages": (request(messages=user({"type": "text", "text": "\ud800"})), "messages"),
    "half a surrogate pair as an image": (request(messages=user({"type": "image", "image": "\ud800"})), "messages"),
    "unknown role": (request(messages='[{"role": "robot", "content": "hello"}]'), "messages[0].role"),
    "content is a number": (request(messages='[{"role": "user", "content": 3}]'), "messages[0].content"),
    "unknown part": (request(messages=user({"type": "audio"})), "'audio'"),
    "part without its image": (request(messages=user({"type": "image"})), "messages[0].content[0]"),
    "image without its part": (request(None, [PICTURE], messages=user({"type": "text", "text": "x"})), "image"),
    "part with an address": (request(messages=user({"type": "image", "image": "https://example.com/a.png"})), "never"),
    "raw messages": (request(messages=user(), raw_prompt=True), "raw_prompt"),
    "repeated messages": (
        request(messages='[{"role": "user", "content": "x"}]', exclude_input_in_output=False),
        "exclude",
    ),
    "too many images": (request("hello", [PICTURE] * 5), "max_images_per_request"),
    "too long": (request("cat " * 5000), f"the context length is {LIMIT}"),
    "too long with its images": (request("cat " * 4080, [PICTURE] * 2), "8 of images"),
    "max_tokens too large": (request("hello", max_tokens=LIMIT), f"exceeds the context length {LIMIT}"),
    "larger than the KV pool": (request("hello", max_tokens=3500), "the whole KV pool holds 3072"),
    "raw prompt is empty": (request("", raw_prompt=True), "empty"),
    "raw prompt lacks an image": (request("<|image_pad|>", raw_prompt=True), "1 image placeholders for 0 images"),
    "raw prompt lacks a place": (request("hello", [PICTURE], raw_prompt=True), "0 image placeholders for 1 images"),
    "images touch": (request("<|image_pad|><|image_pad|>", [PICTURE] * 2, raw_prompt=True), "touch"),
}


@pytest.mark.parametrize(("inputs", "reason"), PROMPTS.values(), ids=PROMPTS)
def test_prompt_that_cannot_be_served_is_refused(server: EmbeddedServer, inputs: Inputs, reason: str) -> None:
    text = refusal(server, inputs)
    assert text.startswith("[INVALID_ARG]")
    assert reason in text


SAMPLING = {
    "no JSON": ("{", "not JSON"),
    "no object": ("[1]", "object"),
    "number beyond reading": ('{"seed": ' + "1" * 5000 + "}", "sampling_parameters"),
    "nested too deep": ("[" * 100_000, "sampling_parameters"),
    "no number": ('{"temperature": "warm"}', "'temperature' is 'warm'"),
    "not a number": ('{"temperature": NaN}', "'temperature'"),
    "negative": ('{"max_tokens": -1}', "'max_tokens' is -1"),
    "zero": ('{"max_tokens": 0}', "'max_tokens' is 0"),
    "half a token": ('{"max_tokens": 1.5}', "'max_tokens' is 1.5"),
    "share above 1": ('{"top_p": 1.5}', "'top_p' is 1.5"),
    "several answers": ('{"n": 2}', "'n' is 2"),
    "empty stop string": ('{"stop": [""]}', "'stop'"),
    "too many log-probabilities": ('{"logprobs": 21}', "'logprobs' is 21"),
    "half a surrogate pair": ('{"\\ud800": 1}', "unknown sampling parameter"),
}


@pytest.mark.parametrize(("parameters", "reason"), SAMPLING.values(), ids=SAMPLING)
def test_sampling_that_cannot_be_served_is_refused(server: EmbeddedServer, parameters: str, reason: str) -> None:
    text = refusal(server, {"text_input": "hello", "sampling_parameters": parameters})
    assert text.startswith("[INVALID_ARG]")
    assert reason in text


def test_refusal_over_http_is_the_same(server: EmbeddedServer) -> None:
    inputs = request("hello", max_tokens=LIMIT)
    status, body = post(server, "orchestrator/generate", inputs)
    assert (status, json.loads(body)["error"]) == (400, refusal(server, inputs))


def test_two_texts_are_refused(server: EmbeddedServer) -> None:
    assert "'text_input'" in ask(server, {**request(), "text_input": ["one", "two"]}).error


def test_unknown_request_parameter_is_named(server: EmbeddedServer) -> None:
    assert "'best_of'" in refusal(server, {"text_input": "hello"}, {"best_of": 2})


def test_unknown_request_parameter_is_named_beside_the_json_too(server: EmbeddedServer) -> None:
    assert "'best_of'" in refusal(server, request("hello"), {"best_of": 2})


def test_sampling_sent_twice_is_refused(server: EmbeddedServer) -> None:
    assert "'max_tokens' came beside 'sampling_parameters'" in refusal(server, request("hello"), {"max_tokens": 2})


RESERVED = {
    "id": "abc",
    "sequence_id": 1,
    "sequence_start": True,
    "sequence_end": True,
    "priority": 1,
    "timeout": 10_000_000,
    "binary_data_output": False,
    "headers": "none",
    "triton_enable_empty_final_response": True,
}


@pytest.mark.parametrize("name", RESERVED)
@pytest.mark.parametrize("path", ["generate", "generate_stream"])
def test_parameter_that_triton_defines_is_let_through(server: EmbeddedServer, name: str, path: str) -> None:
    """On these endpoints Triton hands them on as the client's own."""
    status, body = post(server, f"orchestrator/{path}", {"text_input": "Hello", name: RESERVED[name], "max_tokens": 2})
    assert status == 200
    assert "error" not in body


def test_text_whose_length_is_a_lie_is_refused(server: EmbeddedServer) -> None:
    message = infer_message("orchestrator", {"text_input": "hello"}, {})
    message.raw_input_contents[0] = struct.pack("<I", 1 << 30) + b"hello"
    with Stream(server.grpc_address, message) as stream:
        assert stream.rest().error


def test_empty_text_is_answered(server: EmbeddedServer) -> None:
    assert ask(server, request("", return_num_output_tokens=True)).outputs[0]["num_output_tokens"] == 8


@pytest.mark.parametrize(
    "text", ["<|image_pad|>", "<|vision_start|><|image_pad|><|vision_end|>", "<|im_end|>\n<|im_start|>"]
)
@pytest.mark.parametrize("images", [[], [PICTURE]], ids=["alone", "with an image"])
def test_special_literals_in_a_users_text_are_data(server: EmbeddedServer, text: str, images: list[bytes]) -> None:
    counts = [
        ask(server, request(content, images, return_num_input_tokens=True)).outputs[0]["num_input_tokens"]
        for content in (f"what is {text}?", "what is ?")
    ]
    assert counts[0] > counts[1] + len(text) // 5  # as many tokens as its letters take, not one of a special token


@pytest.mark.parametrize(("width", "height"), [(1, 1), (1, 5), (1000, 5), (5, 1000), (33, 31)])
def test_odd_sizes_are_answered_with_image_tokens(server: EmbeddedServer, width: int, height: int) -> None:
    with_image, without = (
        generate(server, request("what?", images, return_num_input_tokens=True))["num_input_tokens"]
        for images in ([base64.b64encode(picture(width, height)).decode()], [])
    )
    assert with_image > without + 2


def test_two_requests_with_the_same_image_are_answered_alike(server: EmbeddedServer) -> None:
    first, second = (ask(server, request("what is shown?", [PICTURE, PICTURE], logprobs=2)).tokens for _ in range(2))
    assert first == second


def test_other_image_gives_another_answer(server: EmbeddedServer) -> None:
    first, second = (ask(server, request("what is shown?", [picture(64, 64, seed)], logprobs=1)) for seed in (6, 7))
    assert abs(first.logprobs[0] - second.logprobs[0]) > 1e-3


@pytest.mark.parametrize("megabytes", [6, 40])
def test_large_form_body_is_refused_and_the_server_lives(server: EmbeddedServer, megabytes: int) -> None:
    """curl and urllib call a body a form unless told otherwise, and Triton parses forms on its HTTP thread's stack."""
    body = json.dumps({"text_input": "hi", "image": ["A" * (megabytes << 20)]})
    with contextlib.closing(connect(server.http_address)) as connection:
        form = {"Content-Type": "application/x-www-form-urlencoded"}
        connection.request("POST", "/v2/models/orchestrator/generate", body, form)
        reply = connection.getresponse()
        assert (reply.status, b"[INVALID_ARG]" in reply.read()) == (400, True)
