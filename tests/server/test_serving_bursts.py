"""Several decode steps in one call, and steps of two groups at once, on the real server: the plain server's answers."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.serving import statistics_of
from deepstack_serving.embedded import EmbeddedServer
from deepstack_serving.regions import REGION_DIRECTORY, region_prefix
from tests.support.asking import picture
from tests.support.raw_client import Reply, Stream, ask, request
from tests.support.server import gauges, is_whole, kill, reaches, reload, serving

TEXTS = ("hello", "what is shown in this picture?", "describe the image in detail, please")
STEPS = 4


@pytest.fixture(scope="module")
def bursts(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    with serving(checkpoint, tmp_path_factory.mktemp("bursts"), decode_steps_per_call=STEPS) as server:
        (process,) = server.stub_process_ids("orchestrator")
        yield server
    assert list(REGION_DIRECTORY.glob(f"{region_prefix(process)}exchange_*")) == []


@pytest.fixture(scope="module")
def groups(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    with serving(checkpoint, tmp_path_factory.mktemp("groups"), micro_batches=2) as server:
        yield server


@pytest.fixture(params=["bursts", "groups"])
def other(request: pytest.FixtureRequest) -> Iterator[EmbeddedServer]:
    server: EmbeddedServer = request.getfixturevalue(request.param)
    yield server
    assert is_whole(server)


def mixed(**sampling: Any) -> list[dict[str, object]]:
    """Text and images, answers of different lengths."""
    return [
        request(
            TEXTS[number % 3],
            [picture(40 + 30 * image, 50 + 7 * number, number) for image in range(number % 3)],
            **{"max_tokens": 9 + 4 * number, "logprobs": 3, "stream": number % 2 == 0, **sampling},
        )
        for number in range(8)
    ]


def ask_together(server: EmbeddedServer, requests: list[dict[str, object]]) -> list[Reply]:
    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(lambda inputs: ask(server, inputs), requests))


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.2, "top_k": 40, "seed": 11}], ids=["greedy", "sampled"])
def test_answers_are_those_of_the_plain_server(
    server: EmbeddedServer, other: EmbeddedServer, sampling: dict[str, Any]
) -> None:
    requests = mixed(**sampling)
    plain = [ask(server, inputs) for inputs in requests]
    for expected, reply in zip(plain, ask_together(other, requests), strict=True):
        assert (reply.text, reply.token_ids) == (expected.text, expected.token_ids)
        np.testing.assert_allclose(reply.logprobs, expected.logprobs, atol=1e-4)


def test_stop_strings_and_counts_are_those_of_the_plain_server(server: EmbeddedServer, other: EmbeddedServer) -> None:
    options: dict[str, Any] = {"temperature": 1.5, "seed": 5, "max_tokens": 60, "return_num_output_tokens": True}
    text = ask(server, request("hello", **options)).text
    for stop in (text[20:22], text[33:36]):
        inputs = request("hello", stop=stop, return_finish_reason=True, **options)
        (expected,), (output,) = ask(server, inputs).outputs, ask(other, inputs).outputs
        assert output == expected
        assert output["finish_reason"] == "stop"


def test_steps_of_a_burst_take_one_call(bursts: EmbeddedServer) -> None:
    assert is_whole(bursts)
    calls, steps = statistics_of(bursts.http_address, "language_early").executions, gauges(bursts)["engine_steps_total"]
    assert len(ask(bursts, request("hello", max_tokens=1 + 5 * STEPS, logprobs=1)).tokens) == 1 + 5 * STEPS
    assert reaches(bursts, engine_steps_total=steps + 1 + 5 * STEPS)
    assert statistics_of(bursts.http_address, "language_early").executions - calls < 5 * STEPS


def test_client_that_leaves_during_a_burst(other: EmbeddedServer) -> None:
    with Stream(other.grpc_address, request("hello", stream=True, max_tokens=2000)) as stream:
        stream.receive(3)
    assert is_whole(other)


@pytest.mark.parametrize("model", ["language_early", "language_late"])
def test_stage_that_dies_during_a_burst_leaves_nobody_waiting(bursts: EmbeddedServer, model: str) -> None:
    known = ask(bursts, request("hello", logprobs=1)).token_ids
    with Stream(bursts.grpc_address, request("hello", stream=True, max_tokens=2000)) as stream:
        stream.receive(3)
        kill(bursts, model)
        reply = stream.rest()
    assert (len(reply.errors), reply.finals) == (1, 1)
    reload(bursts, model)
    assert ask(bursts, request("hello", logprobs=1)).token_ids == known
    assert is_whole(bursts)
