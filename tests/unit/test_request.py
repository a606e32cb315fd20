"""From input tensors to a request: which inputs go together, and what each one may hold."""

from __future__ import annotations

import re
from typing import Any

import pytest

from deepstack_serving.engine.request import GenerationRequest, parse_request
from deepstack_serving.engine.sampling_parameters import SamplingParameters
from deepstack_serving.errors import InvalidRequestError


def parse(inputs: dict[str, list[Any]], **parameters: object) -> GenerationRequest:
    return parse_request(inputs, parameters, SamplingParameters())


def test_text_and_images_are_taken_as_they_come() -> None:
    request = parse({"text_input": ["hé".encode()], "image": [b"1", b"2"]})
    assert (request.text, request.images, request.raw_prompt) == ("hé", (b"1", b"2"), False)


def test_json_and_request_parameters_exclude_each_other() -> None:
    with pytest.raises(InvalidRequestError, match="'max_tokens' came beside 'sampling_parameters'"):
        parse({"text_input": ["a"], "sampling_parameters": ['{"max_tokens": 3}']}, max_tokens=5)


def test_request_parameters_serve_without_json() -> None:
    assert parse({"text_input": ["a"]}, max_tokens="5").sampling.max_tokens == 5


def test_asking_for_alternatives_returns_logprobs() -> None:
    assert parse({"text_input": ["a"], "sampling_parameters": ['{"logprobs": 2}']}).output.logprobs


@pytest.mark.parametrize(
    "name", ["finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens", "num_output_tokens"]
)
def test_output_is_returned_when_it_is_asked_for(name: str) -> None:
    plain, asked = parse({"text_input": ["a"]}), parse({"text_input": ["a"], f"return_{name}": [True]})
    assert (getattr(plain.output, name), getattr(asked.output, name)) == (False, True)


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ({}, "exactly one of 'text_input' and 'messages'"),
        ({"text_input": []}, "exactly one of 'text_input' and 'messages'"),
        ({"text_input": ["a"], "messages": ["[]"]}, "exactly one of 'text_input' and 'messages'"),
        ({"messages": ["[]"], "raw_prompt": [True]}, "'raw_prompt' goes with 'text_input'"),
        ({"messages": ["[]"], "exclude_input_in_output": [False]}, "'exclude_input_in_output' = false goes with"),
        ({"text_input": ["a"], "stream": [True], "exclude_input_in_output": [False]}, "does not go with 'stream'"),
        ({"text_input": ["a", "b"]}, "'text_input' must hold one element, got 2"),
        ({"text_input": ["a"], "stream": [True, False]}, "'stream' must hold one element, got 2"),
        ({"text_input": [b"\xff"]}, "'text_input' is not UTF-8"),
        ({"text_input": ["a"], "sampling_parameters": [b"\xff"]}, "'sampling_parameters' is not UTF-8"),
    ],
)
def test_inputs_that_do_not_fit_are_refused_by_name(inputs: dict[str, list[Any]], text: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(text)):
        parse(inputs)
