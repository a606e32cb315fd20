"""Every way to ask gives the same answer: gRPC streams and the two HTTP endpoints, streaming or not."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from tritonclient.grpc import InferenceServerClient
from tritonclient.utils import InferenceServerException

from deepstack_serving.embedded import EmbeddedServer
from tests.support.asking import ONE_IMAGE, picture
from tests.support.raw_client import ask, events, generate, post, refusal, request

PICTURE = ONE_IMAGE.images[0]
RETURNS: dict[str, Any] = {
    f"return_{name}": True for name in ("finish_reason", "num_input_tokens", "num_output_tokens")
}


def as_json(inputs: dict[str, Any]) -> dict[str, Any]:
    """The same inputs as JSON carries them."""
    images = [base64.b64encode(image).decode() for image in inputs.get("image", ())]
    return {**inputs, **({"image": images} if images else {})}


def summary(outputs: list[dict[str, Any]]) -> tuple[str, int, int, str]:
    """Joined text, token counts and the reason of the end."""
    text = "".join(output["text_output"] for output in outputs)
    counts = {output["num_input_tokens"] for output in outputs}
    assert len(counts) == 1
    assert all(output["finish_reason"] == "None" for output in outputs[:-1])
    return text, counts.pop(), sum(output["num_output_tokens"] for output in outputs), outputs[-1]["finish_reason"]


@pytest.mark.parametrize("images", [(), (PICTURE,), (PICTURE, picture(64, 64, 2))], ids=["text", "image", "images"])
def test_all_entry_points_give_the_same_answer(server: EmbeddedServer, images: tuple[bytes, ...]) -> None:
    whole, pieces = (request("what is shown?", images, stream=stream, **RETURNS) for stream in (False, True))
    expected = summary(ask(server, whole).outputs)
    assert expected[2:] == (8, "length")
    assert summary(ask(server, pieces).outputs) == expected
    assert summary([generate(server, as_json(whole))]) == expected
    assert summary(events(server, as_json(whole))) == expected
    assert summary(events(server, as_json(pieces))) == expected


@pytest.mark.parametrize("stream", [False, True])
def test_one_final_response(server: EmbeddedServer, stream: bool) -> None:
    reply = ask(server, request("what is shown?", stream=stream))
    assert reply.finals == 1
    assert stream or len(reply.outputs) == 1


def test_stream_comes_in_pieces(server: EmbeddedServer) -> None:
    assert len(ask(server, request("what is shown?", stream=True, max_tokens=32)).outputs) > 4


def test_only_the_text_is_returned_unless_more_is_asked_for(server: EmbeddedServer) -> None:
    assert set(ask(server, request("hello")).outputs[0]) == {"text_output"}


@pytest.mark.parametrize(
    "name", ["finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens", "num_output_tokens"]
)
def test_return_flag_adds_its_output(server: EmbeddedServer, name: str) -> None:
    wanted: dict[str, Any] = {f"return_{name}": True}
    assert set(ask(server, request("hello", **wanted)).outputs[0]) == {"text_output", name}


def test_log_probabilities_add_up(server: EmbeddedServer) -> None:
    reply = ask(server, request("hello", logprobs=3, return_cumulative_logprob=True))
    assert reply.outputs[0]["cumulative_logprob"] == pytest.approx(sum(reply.logprobs), abs=1e-3)
    assert all(token["top_logprobs"][0]["token_id"] == token["token_id"] for token in reply.tokens)
    assert {len(token["top_logprobs"]) for token in reply.tokens} == {3}


def test_prompt_is_repeated_when_it_is_not_excluded(server: EmbeddedServer) -> None:
    answer = ask(server, request("hello")).text
    assert ask(server, request("hello", exclude_input_in_output=False)).text == "hello" + answer


def test_prompt_is_not_repeated_in_a_stream(server: EmbeddedServer) -> None:
    text = refusal(server, request("hello", exclude_input_in_output=False, stream=True))
    assert text.startswith("[INVALID_ARG]")
    assert "exclude_input_in_output" in text


def test_request_parameters_serve_without_sampling_parameters(server: EmbeddedServer) -> None:
    expected = ask(server, request("hello", max_tokens=5, seed=3, temperature=1.5)).text
    parameters = {"max_tokens": 5, "seed": 3, "temperature": 1.5, "ignore_eos": True}
    assert ask(server, {"text_input": "hello"}, parameters).text == expected
    assert generate(server, {"text_input": "hello", **parameters})["text_output"] == expected


def test_numbers_may_be_texts(server: EmbeddedServer) -> None:
    as_numbers = request("hello", max_tokens=6, temperature=1.5, top_k=20, seed=7)
    as_texts = request("hello", max_tokens="6", temperature="1.5", top_k="20", seed="7")
    assert ask(server, as_texts).text == ask(server, as_numbers).text


def test_unknown_sampling_parameter_is_named(server: EmbeddedServer) -> None:
    text = refusal(server, request("hello", best_of=2))
    assert text.startswith("[INVALID_ARG]")
    assert "'best_of'" in text


def test_refused_request_is_status_400_over_http(server: EmbeddedServer) -> None:
    for path in ("generate", "generate_stream"):
        status, body = post(server, f"orchestrator/{path}", request("hello", best_of=2))
        assert status == 400
        assert "'best_of'" in json.loads(body.removeprefix("data: "))["error"]


def conversation(*parts: dict[str, Any]) -> str:
    return json.dumps([{"role": "user", "content": list(parts)}])


def test_image_is_the_same_by_every_way(server: EmbeddedServer) -> None:
    encoded = base64.b64encode(PICTURE).decode()
    address = f"data:image/png;base64,{encoded}"
    text = {"type": "text", "text": "what is shown?"}
    options: dict[str, Any] = {"logprobs": 5}
    expected = ask(server, request("what is shown?", [PICTURE], **options)).tokens
    ways = [
        request("what is shown?", [encoded.encode()], **options),
        request("what is shown?", [address.encode()], **options),
        request(messages=conversation({"type": "image"}, text), images=[PICTURE], **options),
        request(messages=conversation({"type": "image", "image": address}, text), **options),
        request(messages=conversation({"type": "image_url", "image_url": {"url": address}}, text), **options),
    ]
    assert [ask(server, way).tokens for way in ways] == [expected] * len(ways)


def test_images_of_messages_stand_where_their_parts_stand(server: EmbeddedServer) -> None:
    first, second = PICTURE, picture(64, 64, 2)
    image, text = {"type": "image"}, {"type": "text", "text": "and"}
    between = request(messages=conversation(image, text, image), images=[first, second], logprobs=1)
    raw = "<|im_start|>user\n{0}and{0}<|im_end|>\n<|im_start|>assistant\n"
    rendered = raw.format("<|vision_start|><|image_pad|><|vision_end|>")
    expected = ask(server, request(rendered, [first, second], raw_prompt=True, logprobs=1)).tokens
    assert ask(server, between).tokens == expected
    swapped = request(messages=conversation(image, text, image), images=[second, first], logprobs=1)
    assert ask(server, swapped).tokens != expected


def test_images_of_earlier_turns_count(server: EmbeddedServer) -> None:
    turns = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is shown?"}]},
        {"role": "assistant", "content": "a cat"},
        {"role": "user", "content": "are you sure?"},
    ]
    one, other = (
        ask(server, request(messages=json.dumps(turns), images=[image], logprobs=1))
        for image in (PICTURE, picture(100, 70, 9))
    )
    assert one.logprobs[0] != pytest.approx(other.logprobs[0], abs=1e-3)


def test_empty_list_of_images_is_none(server: EmbeddedServer) -> None:
    inputs = request("hello")
    assert generate(server, {**inputs, "image": []})["text_output"] == ask(server, inputs).text


def test_plain_infer_is_not_to_be_had(server: EmbeddedServer) -> None:
    status, _ = post(
        server,
        "orchestrator/infer",
        {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["hello"]}]},
    )
    assert status == 501
    with InferenceServerClient(server.grpc_address) as client, pytest.raises(InferenceServerException) as caught:
        client.infer("orchestrator", [])
    assert "UNIMPLEMENTED" in str(caught.value.status())


def test_default_length_is_used_without_max_tokens(server: EmbeddedServer) -> None:
    reply = ask(server, {"text_input": "hello", "return_num_output_tokens": True}, {"ignore_eos": True})
    assert reply.outputs[0]["num_output_tokens"] == 256
