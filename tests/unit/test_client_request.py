"""The client's requests: which inputs a call becomes, and what is refused before anything is sent."""

import base64
import json
from pathlib import Path

import pytest

from deepstack_client import InvalidRequestError, RequestOptions
from deepstack_client.request import RequestFactory, WireRequest
from deepstack_client.transports import grpc_codec, http_codec

PNG = b"\x89PNG pixels"


def build(prompt="What number?", images=(), stream=True, **options) -> WireRequest:
    return RequestFactory("orchestrator", 30.0).build(prompt, images, stream, RequestOptions(**options))[0]


def sampling(request: WireRequest) -> dict[str, object]:
    return json.loads(request.inputs["sampling_parameters"])


def test_a_prompt_becomes_text_input():
    assert build("Hello").inputs["text_input"] == "Hello"


def test_messages_take_the_place_of_text_input():
    request = build([{"role": "user", "content": "Hello"}])
    assert json.loads(request.inputs["messages"]) == [{"role": "user", "content": "Hello"}]
    assert "text_input" not in request.inputs


def test_image_bytes_inside_a_message_become_base64():
    request = build([{"role": "user", "content": [{"type": "image", "image": PNG}, {"type": "text", "text": "?"}]}])
    part = json.loads(request.inputs["messages"])[0]["content"][0]
    assert base64.b64decode(part["image"]) == PNG


def test_images_keep_their_order_whether_path_or_bytes(tmp_path: Path):
    path = tmp_path / "one.png"
    path.write_bytes(b"first")
    assert build(images=[path, b"second", str(path)]).inputs["image"] == (b"first", b"second", b"first")


def test_without_images_the_input_is_left_out():
    assert "image" not in build().inputs


def test_only_given_sampling_parameters_are_sent():
    assert sampling(build(max_tokens=8, temperature=0.0, seed=None)) == {"max_tokens": 8, "temperature": 0.0}


def test_the_model_returns_the_answer_alone_and_its_finish_reason():
    inputs = build().inputs
    assert inputs["exclude_input_in_output"] is True
    assert inputs["return_finish_reason"] is True


@pytest.mark.parametrize("options, wanted", [({}, False), ({"logprobs": 0}, True)])
def test_logprobs_are_returned_when_asked_for(options, wanted):
    assert build(**options).inputs["return_logprobs"] is wanted


def test_raw_prompt_is_sent_only_when_set():
    assert build(raw_prompt=True).inputs["raw_prompt"] is True
    assert "raw_prompt" not in build(raw_prompt=False).inputs


def test_requests_get_different_ids():
    assert build().request_id != build().request_id


def test_a_given_request_id_is_kept():
    assert build(request_id="mine").request_id == "mine"


@pytest.mark.parametrize("options, timeout_s", [({}, 30.0), ({"timeout_s": None}, None), ({"timeout_s": 2.0}, 2.0)])
def test_the_request_s_time_limit_overrides_the_client_s(options, timeout_s):
    assert RequestFactory("orchestrator", 30.0).build("?", (), True, options)[1] == timeout_s


def test_an_unknown_option_is_named():
    with pytest.raises(TypeError, match=r"max_token$"):
        build(max_token=3)


@pytest.mark.parametrize(
    "arguments, text",
    [
        ({"images": [b""]}, "image is empty"),
        ({"images": ["no/such.png"]}, "cannot read image no/such.png"),
        ({"images": [7]}, "not int"),
        ({"images": "one.png"}, r"wrap a single image as \[image\]"),
        ({"prompt": []}, "messages is empty"),
        ({"prompt": [{"content": "?"}]}, "needs 'role'"),
        ({"prompt": [{"role": "user", "content": 7}]}, "not int"),
        ({"temperature": float("nan")}, "sampling parameters"),
    ],
)
def test_what_cannot_be_sent_is_refused(arguments, text):
    with pytest.raises(InvalidRequestError, match=text):
        build(**arguments)


HALF_PAIR = "half a pair: \ud800"


@pytest.mark.parametrize(
    "prompt, options, name",
    [
        (HALF_PAIR, {}, "the prompt"),
        ([{"role": "user", "content": HALF_PAIR}], {}, "messages"),
        ("Hello", {"stop": [HALF_PAIR]}, "sampling parameters"),
        ("Hello", {"request_id": HALF_PAIR}, "request_id"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_text_that_is_not_unicode_is_refused_before_it_is_sent(prompt, options, name, stream):
    with pytest.raises(InvalidRequestError, match=f"^{name} is not valid Unicode text"):
        build(prompt, stream=stream, **options)


def test_request_parameters_go_beside_the_inputs():
    request = build(parameters={"audit_zero": "all"})
    assert request.parameters == {"audit_zero": "all"}
    assert "audit_zero" not in request.inputs
    assert "audit_zero" not in sampling(request)


def test_request_parameters_are_sent_by_both_protocols():
    request = build(parameters={"audit_zero": "all"})
    assert grpc_codec.encode_request(request).parameters["audit_zero"].string_param == "all"
    assert json.loads(http_codec.encode_request(request)[1])["audit_zero"] == "all"
