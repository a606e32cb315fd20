"""A server whose stages die, change or stop: requests end with an error in bounded time, and all comes right again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from deepstack_client import Client, ClientError
from deepstack_serving.embedded import EmbeddedServer, ModelLoadError, ServerOptions
from tests.server.conftest import check_known_answers
from tests.support.asking import Answer, picture
from tests.support.raw_client import Stream, abandon, refusal, request
from tests.support.server import (
    MODELS,
    READY_TIMEOUT_S,
    REPOSITORY,
    environment,
    gated_repository,
    held,
    is_whole,
    kill,
    reaches,
    reload,
    serving,
)
from tests.support.tiny import TinyShape, write_checkpoint

TIME_LIMIT_S = 6
LONG: dict[str, Any] = {"max_tokens": 4000, "stream": True}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy that tests may change."""
    return gated_repository(tmp_path_factory.mktemp("faults") / "repository")


@pytest.fixture(scope="module")
def module_server(
    checkpoint: Path, repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EmbeddedServer]:
    """One request runs, one waits, and none takes longer than the time limit."""
    settings = {"max_running_requests": 1, "max_waiting_requests": 1, "kv_pool_tokens": 8192}
    limits = {"request_timeout_s": TIME_LIMIT_S, "startup_timeout_s": 1}
    with serving(checkpoint, tmp_path_factory.mktemp("run"), repository, **settings, **limits) as server:
        yield server


@pytest.fixture
def own_server(module_server: EmbeddedServer, known_answers: list[Answer]) -> Iterator[EmbeddedServer]:
    """That server; after the test it is ready, all its blocks are free and it answers rightly."""
    yield module_server
    revive(module_server)
    assert reaches(module_server, ready=1)
    assert is_whole(module_server)
    check_known_answers(module_server, known_answers)


def revive(server: EmbeddedServer) -> None:
    """What an operator does with dead models."""
    for model in MODELS:
        if not server.stub_process_ids(model):
            reload(server, model)


def long_stream(server: EmbeddedServer) -> Stream:
    return Stream(server.grpc_address, request("hello", **LONG))


def test_request_beyond_the_queue_is_refused(own_server: EmbeddedServer) -> None:
    with long_stream(own_server) as running:
        running.receive(1)
        with long_stream(own_server):
            assert reaches(own_server, waiting_requests=1)
            assert refusal(own_server, request("hello")).startswith("[UNAVAILABLE] 1 requests are waiting already")


def test_time_limit_ends_a_request_in_decode_and_one_in_the_queue(own_server: EmbeddedServer) -> None:
    with long_stream(own_server) as running, long_stream(own_server) as waiting:
        errors = [*running.rest().errors, *waiting.rest().errors]
    assert len(errors) == 2
    assert all(text.startswith("[UNAVAILABLE]") and "request_timeout_s" in text for text in errors)
    assert (running.reply.finals, waiting.reply.finals) == (1, 1)


def test_time_limit_ends_a_request_in_encode(own_server: EmbeddedServer) -> None:
    with held(own_server, "vision_encoder"):
        assert "request_timeout_s" in refusal(own_server, request("what?", [picture(64, 64, 91)]))


def test_http_client_that_leaves_before_the_answer_is_over_at_the_time_limit(own_server: EmbeddedServer) -> None:
    abandon(own_server, "orchestrator/generate", request("hello", max_tokens=4000))
    assert reaches(own_server, running_requests=1)
    assert is_whole(own_server)


@pytest.mark.parametrize("model", ["language_early", "language_late"])
def test_killed_language_stage_ends_its_requests(own_server: EmbeddedServer, model: str) -> None:
    with long_stream(own_server) as running:
        running.receive(3)
        kill(own_server, model)
        reply = running.rest()
    assert (len(reply.errors), reply.finals) == (1, 1)
    assert model in reply.errors[0]
    assert reaches(own_server, ready=0)
    assert model in refusal(own_server, request("hello"))


def test_killed_encoder_ends_its_requests(own_server: EmbeddedServer) -> None:
    with Stream(own_server.grpc_address, request("what?", [picture(64, 64, 92)])) as stream:
        with held(own_server, "vision_encoder"):
            assert reaches(own_server, running_requests=1)
            kill(own_server, "vision_encoder")
        assert "vision_encoder" in stream.rest().error
    assert reaches(own_server, ready=0)


def test_stage_that_dies_while_nothing_runs_is_noticed(own_server: EmbeddedServer) -> None:
    kill(own_server, "language_late")
    assert reaches(own_server, ready=0)


def test_stage_unloaded_under_a_stream_ends_it(own_server: EmbeddedServer) -> None:
    with long_stream(own_server) as running:
        running.receive(3)
        own_server.unload("language_late")
        assert "language_late" in running.rest().errors[0]


def test_killed_orchestrator_leaves_no_client_waiting(own_server: EmbeddedServer) -> None:
    with Client(f"grpc://{own_server.grpc_address}", timeout_s=TIME_LIMIT_S) as client:
        with client.stream("hello", max_tokens=4000, ignore_eos=True) as stream:
            next(stream)
            kill(own_server, "orchestrator")
            with pytest.raises(ClientError):
                stream.completion()
        with pytest.raises(ClientError):
            client.generate("hello")


@pytest.fixture
def change_settings(repository: Path, own_server: EmbeddedServer) -> Iterator[Callable[[str, str], None]]:
    """Changes one setting as language_late finds it when it is loaded next."""
    path = repository / "language_late" / "1" / "model.py"
    source = path.read_text()
    place = "\n\n\nclass TritonPythonModel:\n"
    assert place in source

    def change(name: str, value: str) -> None:
        path.write_text(source.replace(place, f"\nimport os\n\nos.environ[{name!r}] = {value!r}{place}", 1))

    yield change
    path.write_text(source)
    reload(own_server, "language_late")


def test_stage_of_another_split_is_refused(
    own_server: EmbeddedServer, change_settings: Callable[[str, str], None]
) -> None:
    change_settings("DEEPSTACK_SPLIT_POINTS", "2")
    reload(own_server, "language_late")
    text = refusal(own_server, request("hello"))
    assert "language_late holds the layers 2 to 6, the orchestrator expects 3 to 6" in text


def test_stage_of_another_checkpoint_is_refused(
    own_server: EmbeddedServer, change_settings: Callable[[str, str], None], tmp_path: Path
) -> None:
    other = write_checkpoint(tmp_path / "other", TinyShape(seed=1))
    change_settings("DEEPSTACK_CHECKPOINT", str(other))
    reload(own_server, "language_late")
    assert "language_late loaded another checkpoint" in refusal(own_server, request("hello"))


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [("DTYPE", "int3", "bfloat16"), ("SPLIT_POINTS", "9", "6"), ("SPLITS", "3", "split_points")],
)
def test_setting_that_is_not_allowed_fails_the_load(
    own_server: EmbeddedServer, change_settings: Callable[[str, str], None], name: str, value: str, allowed: str
) -> None:
    change_settings(f"DEEPSTACK_{name}", value)
    own_server.unload("language_late")
    with pytest.raises(ModelLoadError) as caught:
        own_server.load("language_late", READY_TIMEOUT_S)
    reason = caught.value.reasons["language_late"]
    assert name.lower() in reason
    assert value in reason or name == "SPLITS"
    assert allowed in reason


def test_server_with_an_unknown_setting_does_not_start(checkpoint: Path, tmp_path: Path) -> None:
    values = environment(checkpoint, number_of_gpus=2)
    with (
        EmbeddedServer(REPOSITORY, MODELS, values, ServerOptions(run_directory=tmp_path)) as server,
        pytest.raises(ModelLoadError, match="unknown setting 'number_of_gpus'"),
    ):
        server.wait_until_ready(READY_TIMEOUT_S)


def test_stop_lets_a_stream_finish(module_server: EmbeddedServer) -> None:
    """The last test of this file: the server is gone afterwards."""
    with Stream(module_server.grpc_address, request("hello", max_tokens=300, stream=True, logprobs=1)) as stream:
        stream.receive(2)
        with ThreadPoolExecutor(1) as pool:
            rest = pool.submit(stream.rest)
            module_server.stop()
            reply = rest.result()
    assert (len(reply.tokens), reply.finals) == (300, 1)
    assert not module_server.is_running()
