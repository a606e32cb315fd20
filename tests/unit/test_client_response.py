"""The client's reading of responses: chunks, the completion, broken contracts, and error texts."""

import pytest

from deepstack_client import (
    InvalidRequestError,
    ProtocolError,
    RequestCancelledError,
    ServerError,
    ServerUnavailableError,
)
from deepstack_client.errors import error_from_text
from deepstack_client.response import Completion, ResponseReader, WireResponse
from deepstack_client.testing import piece


def read(*responses: WireResponse) -> Completion:
    reader = ResponseReader("id")
    for response in (*responses, None):
        reader.feed(response)
    return reader.completion()


def test_texts_and_counts_are_added_up():
    completion = read(piece("4", num_output_tokens=2), piece("2", num_output_tokens=3, finish_reason="length"))
    assert (completion.text, completion.num_output_tokens, completion.finish_reason) == ("42", 5, "length")


def test_logprobs_are_joined_and_the_cumulative_one_is_the_last():
    first = piece("4", logprobs='[{"1": -0.5}]', cumulative_logprob=-0.5)
    last = piece("2", logprobs='[{"2": -1}]', cumulative_logprob=-1.5, finish_reason="stop")
    completion = read(first, last)
    assert completion.logprobs == ({"1": -0.5}, {"2": -1})
    assert completion.cumulative_logprob == -1.5


def test_a_chunk_before_the_end_has_no_finish_reason():
    chunk = ResponseReader("id").feed(piece("4"))
    assert chunk is not None
    assert chunk.finish_reason is None


def test_the_final_chunk_is_held_back_until_the_stream_has_ended():
    reader = ResponseReader("id")
    assert reader.feed(piece("42", finish_reason="stop")) is None
    chunk = reader.feed(None)
    assert chunk is not None
    assert chunk.text == "42"


def test_a_response_without_outputs_is_passed_over():
    assert read(piece("42", finish_reason="stop"), WireResponse({})).text == "42"


def test_an_end_without_a_final_response_is_a_protocol_error():
    with pytest.raises(ProtocolError, match="without a final response"):
        read(piece("4"))


def test_a_response_after_the_final_one_is_a_protocol_error():
    with pytest.raises(ProtocolError, match="after the final one"):
        read(piece("4", finish_reason="stop"), piece("2"))


@pytest.mark.parametrize(
    "outputs",
    [{"text_output": 7}, {"num_input_tokens": "7"}, {"cumulative_logprob": "x"}, {"logprobs": "{"}, {"logprobs": "{}"}],
)
def test_an_output_of_the_wrong_kind_is_named(outputs):
    with pytest.raises(ProtocolError, match=next(iter(outputs))):
        read(WireResponse({"finish_reason": "stop", **outputs}))


@pytest.mark.parametrize(
    "code, kind",
    [
        ("INVALID_ARG", InvalidRequestError),
        ("UNAVAILABLE", ServerUnavailableError),
        ("CANCELLED", RequestCancelledError),
        ("INTERNAL", ServerError),
    ],
)
def test_a_coded_error_text_gives_its_type_and_loses_the_code(code, kind):
    error = error_from_text(f"[{code}] top_p must be at most 1")
    assert (type(error), str(error)) == (kind, "top_p must be at most 1")


def test_the_code_is_found_behind_triton_s_request_id():
    error = error_from_text("[request id: 7] [INVALID_ARG] no prompt")
    assert (type(error), str(error)) == (InvalidRequestError, "no prompt")


def test_a_model_that_is_not_loaded_is_unavailable_whatever_the_status():
    error = error_from_text("Request for unknown model: 'orchestrator' is not found", InvalidRequestError)
    assert type(error) is ServerUnavailableError


@pytest.mark.parametrize("text", ["no code", "[image] is missing", "[UNHEARD_OF] code"])
def test_a_text_without_a_known_code_takes_the_type_of_the_status(text):
    error = error_from_text(text, InvalidRequestError)
    assert (type(error), str(error)) == (InvalidRequestError, text)
