"""Many requests at once: each is answered as if it were alone, and those that are given up leave nothing behind."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from deepstack_serving.embedded import EmbeddedServer
from tests.support.asking import picture
from tests.support.raw_client import Inputs, Reply, Stream, ask, events, http_response, infer_message, request
from tests.support.server import eventually, gauges, held, is_whole, reaches

TEXTS = ("hello", "what is shown in this picture?", "describe the image in detail, please", "a cat sits on a mat")
BUDGET = 64  # of the shared server's prompt tokens per step


def mixed(count: int, **sampling: Any) -> list[dict[str, object]]:
    """Text requests and requests with one to three images, of different lengths."""
    return [
        request(
            TEXTS[number % len(TEXTS)] * (1 + number // 5),
            [picture(40 + 30 * image, 50 + 7 * number, number) for image in range(number % 4)],
            **{"max_tokens": 6 + number, "logprobs": 3, "stream": number % 2 == 0, **sampling},
        )
        for number in range(count)
    ]


def ask_together(server: EmbeddedServer, requests: list[dict[str, object]]) -> list[Reply]:
    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(lambda inputs: ask(server, inputs), requests))


def test_concurrent_requests_equal_their_solo_runs(server: EmbeddedServer) -> None:
    requests = mixed(14)
    alone = [ask(server, inputs) for inputs in requests]
    for solo, together in zip(alone, ask_together(server, requests), strict=True):
        assert together.token_ids == solo.token_ids
        np.testing.assert_allclose(together.logprobs, solo.logprobs, atol=1e-4)


def test_seeded_requests_draw_the_same_tokens_alone_and_together(server: EmbeddedServer) -> None:
    requests = mixed(12, temperature=1.2, top_k=40, top_p=0.95, min_p=0.01, seed=11)
    alone = [ask(server, inputs).token_ids for inputs in requests]
    assert [reply.token_ids for reply in ask_together(server, requests)] == alone


def test_other_seed_draws_other_tokens(server: EmbeddedServer) -> None:
    first, second = (ask(server, request("hello", temperature=2, seed=seed, logprobs=1)).token_ids for seed in (1, 2))
    assert first != second


SAMPLED: dict[str, Any] = {"temperature": 1.5, "seed": 5, "max_tokens": 120}


@pytest.mark.parametrize("length", [1, 2, 7])
def test_nothing_at_or_after_a_stop_string_leaks(server: EmbeddedServer, length: int) -> None:
    whole = ask(server, request("hello", **SAMPLED)).text
    stop = whole[30 : 30 + length]
    expected = whole[: whole.index(stop)]
    for stream in (False, True):
        reply = ask(server, request("hello", stream=stream, stop=stop, return_finish_reason=True, **SAMPLED))
        assert reply.text == expected
        assert reply.outputs[-1]["finish_reason"] == "stop"


def test_first_of_several_stop_strings_ends_the_answer(server: EmbeddedServer) -> None:
    whole = ask(server, request("hello", **SAMPLED)).text
    stops = [whole[40:44], whole[20:23], "never said"]
    expected = whole[: min(whole.index(stop) for stop in stops[:2])]
    assert ask(server, request("hello", stop=stops, stream=True, **SAMPLED)).text == expected


@pytest.mark.parametrize("seed", range(4))
def test_joined_stream_equals_the_whole_text(server: EmbeddedServer, seed: int) -> None:
    """Random bytes of a random model: most of its characters come in parts, and many never become one."""
    sampling: dict[str, Any] = {"temperature": 3.0, "seed": seed, "max_tokens": 150}
    whole = ask(server, request("hello", **sampling)).text
    assert ask(server, request("hello", stream=True, **sampling)).text == whole
    pieces = events(server, request("hello", stream=True, **sampling))
    assert "".join(piece["text_output"] for piece in pieces) == whole


def long_request(server: EmbeddedServer, **options: Any) -> Stream:
    """A request that holds nearly the whole pool and would run for long."""
    return Stream(server.grpc_address, request("hello", stream=True, max_tokens=3000, **options))


def test_cancelled_in_decode(server: EmbeddedServer) -> None:
    with long_request(server) as stream:
        stream.receive(3)
    assert is_whole(server)


def test_cancelled_in_the_queue(server: EmbeddedServer) -> None:
    with long_request(server) as running:
        running.receive(1)
        with long_request(server):
            assert reaches(server, waiting_requests=1, running_requests=1)
        assert reaches(server, waiting_requests=0, running_requests=1, active_requests=1)
        running.receive(1)
    assert is_whole(server)


def test_cancelled_in_encode(server: EmbeddedServer) -> None:
    with held(server, "vision_encoder"):
        with Stream(server.grpc_address, request("what?", [picture(64, 64, 77)])):
            assert reaches(server, running_requests=1)
        assert is_whole(server)


def test_text_is_answered_while_images_are_encoded(server: EmbeddedServer) -> None:
    with held(server, "vision_encoder"), Stream(server.grpc_address, request("what?", [picture(64, 64, 78)])):
        assert reaches(server, running_requests=1)
        assert len(ask(server, request("hello", logprobs=1)).tokens) == 8


def test_cancelled_in_prefill(server: EmbeddedServer) -> None:
    before = gauges(server)["prompt_tokens_total"]
    with held(server, "language_late"), Stream(server.grpc_address, request("cat " * 2500)):
        assert reaches(server, running_requests=1)
    assert is_whole(server)
    assert gauges(server)["prompt_tokens_total"] - before < 20 * BUDGET


def test_all_kinds_of_leaving_at_random_moments(server: EmbeddedServer) -> None:
    generator = random.Random(3)
    requests = mixed(40, max_tokens=60, stream=True)
    moments = [generator.randrange(12) for _ in requests]

    def leave(inputs: Inputs, moment: int) -> None:
        with Stream(server.grpc_address, inputs) as stream:
            stream.receive(moment)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(leave, requests, moments))
    assert is_whole(server)


def test_http_client_that_leaves_a_stream(server: EmbeddedServer) -> None:
    inputs = request("hello", stream=True, max_tokens=3000)
    with http_response(server, "orchestrator/generate_stream", inputs) as response:
        assert response.readline().startswith(b"data: ")
    assert is_whole(server)


ABANDONED = """
import sys
import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc
message = service_pb2.ModelInferRequest.FromString(bytes.fromhex(sys.argv[2]))
call = service_pb2_grpc.GRPCInferenceServiceStub(grpc.insecure_channel(sys.argv[1])).ModelStreamInfer(iter([message]))
for response in call:
    print("response", flush=True)
"""


@pytest.fixture
def client_process(server: EmbeddedServer) -> Iterator[subprocess.Popen[str]]:
    """A client in the middle of a long stream."""
    message = infer_message("orchestrator", request("hello", stream=True, max_tokens=3000), {})
    command = [sys.executable, "-c", ABANDONED, server.grpc_address, message.SerializeToString().hex()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def test_killed_client_frees_its_request(server: EmbeddedServer, client_process: subprocess.Popen[str]) -> None:
    assert client_process.stdout is not None
    assert client_process.stdout.readline() == "response\n"
    assert gauges(server)["active_requests"] == 1 or eventually(lambda: gauges(server)["active_requests"] == 1)
    os.kill(client_process.pid, signal.SIGKILL)
    assert is_whole(server)
