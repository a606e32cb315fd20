"""The embedded server runs throw-away models on the real tritonserver."""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deepstack_serving.embedded import (
    EmbeddedServer,
    ModelLoadError,
    PortInUseError,
    Ports,
    ServerOptions,
    ServerStartError,
    launching,
)
from deepstack_serving.embedded.ports import choose_ports
from deepstack_serving.errors import InvalidRequestError, UnavailableError

READY_TIMEOUT_S = 60.0
SMALL = ServerOptions(shared_memory_bytes=1 << 20, shared_memory_growth_bytes=1 << 20, exit_timeout_s=5)

DECOUPLED_CONFIG = """
backend: "python"
max_batch_size: 0
model_transaction_policy { decoupled: true }
input [ { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] } ]
instance_group [ { kind: KIND_CPU count: 1 } ]
"""
# Answers "packages" with where the model's Python finds its packages, and any other text with that text once the file
# that the text names exists ("wait:<path>") or at once. It counts running requests as an orchestrator does.
ENTRY_MODEL = """
import os, sys, threading, time
from pathlib import Path
import numpy
import triton_python_backend_utils as pb_utils
import deepstack_serving

class TritonPythonModel:
    def initialize(self, args):
        family = pb_utils.MetricFamily(
            name="deepstack_active_requests", description="running", kind=pb_utils.MetricFamily.GAUGE)
        self.family, self.gauge = family, family.Metric(labels={})

    def execute(self, requests):
        for request in requests:
            text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()[0].decode()
            self.gauge.increment(1)
            threading.Thread(target=self.answer, args=(request.get_response_sender(), text)).start()

    def answer(self, sender, text):
        if text.startswith("unavailable"):
            error = pb_utils.TritonError("[UNAVAILABLE] starting")
            response = pb_utils.InferenceResponse(error=error)
        else:
            if text.startswith("wait:"):
                path = Path(text.removeprefix("wait:"))
                path.with_suffix(".running").touch()
                while not path.exists():
                    time.sleep(0.01)
            if text == "packages":
                text = f"{sys.prefix}|{deepstack_serving.__file__}|{os.environ['DEEPSTACK_ANSWER']}"
            output = pb_utils.Tensor("text_output", numpy.array([text.encode()], dtype=object))
            response = pb_utils.InferenceResponse([output])
        sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        self.gauge.increment(-1)
"""
PLAIN_CONFIG = """
backend: "python"
max_batch_size: 0
input [ { name: "x" data_type: TYPE_INT32 dims: [ -1 ] } ]
output [ { name: "y" data_type: TYPE_INT32 dims: [ -1 ] } ]
instance_group [ { kind: KIND_CPU count: 1 } ]
"""
REFUSING_MODEL = """
class TritonPythonModel:
    def initialize(self, args):
        raise ValueError("setting 'dtype' has the value 'int3'; allowed: float32")
"""


def write_model(repository: Path, name: str, source: str = ENTRY_MODEL, config: str = DECOUPLED_CONFIG) -> None:
    version = repository / name / "1"
    version.mkdir(parents=True)
    version.joinpath("model.py").write_text(source)
    version.parent.joinpath("config.pbtxt").write_text(config)


def wait_for(condition: Callable[[], bool], timeout_s: float = 20.0) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return condition()


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    write_model(folder, "orchestrator")
    write_model(folder, "refusing", REFUSING_MODEL, PLAIN_CONFIG)
    return folder


@pytest.fixture(scope="module")
def shared_server(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """One server for the tests that leave it as they found it."""
    options = dataclasses.replace(SMALL, run_directory=tmp_path_factory.mktemp("run"))
    with EmbeddedServer(repository, ["orchestrator"], {"DEEPSTACK_ANSWER": "42"}, options) as server:
        server.wait_until_ready(READY_TIMEOUT_S)
        yield server


def test_model_sees_this_interpreters_packages_and_the_given_environment(shared_server: EmbeddedServer) -> None:
    prefix, package, answer = shared_server.ask("packages").split("|")
    assert (prefix, answer) == (sys.prefix, "42")
    assert Path(package).parent.name == "deepstack_serving"


def test_probe_is_repeated_while_it_says_unavailable(shared_server: EmbeddedServer) -> None:
    outcomes = iter([UnavailableError("starting"), UnavailableError("starting"), None])

    def probe() -> None:
        if (error := next(outcomes)) is not None:
            raise error

    shared_server.wait_until_ready(READY_TIMEOUT_S, probe)
    assert next(outcomes, "exhausted") == "exhausted"


def test_probe_that_stays_unavailable_raises_after_the_timeout(shared_server: EmbeddedServer) -> None:
    def probe() -> None:
        shared_server.ask("unavailable")

    with pytest.raises(UnavailableError, match="starting"):
        shared_server.wait_until_ready(1.0, probe)


def test_other_errors_of_the_probe_are_raised_at_once(shared_server: EmbeddedServer) -> None:
    def probe() -> None:
        raise InvalidRequestError("no such thing")

    with pytest.raises(InvalidRequestError):
        shared_server.wait_until_ready(READY_TIMEOUT_S, probe)


def test_model_that_refuses_to_load_is_named_with_its_reason(shared_server: EmbeddedServer) -> None:
    with pytest.raises(ModelLoadError) as caught:
        shared_server.load("refusing", READY_TIMEOUT_S)
    assert caught.value.reasons == {"refusing": "ValueError: setting 'dtype' has the value 'int3'; allowed: float32"}


def test_start_without_the_models_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ServerStartError, match="no folder for absent"):
        EmbeddedServer(tmp_path, ["absent"]).start()


def test_wanted_port_in_use_is_named(repository: Path, shared_server: EmbeddedServer) -> None:
    taken = int(shared_server.http_address.rpartition(":")[2])
    with pytest.raises(PortInUseError, match=str(taken)):
        EmbeddedServer(repository, ["orchestrator"], options=ServerOptions(ports=Ports(http=taken))).start()


def test_server_that_ends_while_starting_raises(repository: Path, tmp_path: Path) -> None:
    options = ServerOptions(run_directory=tmp_path, extra_arguments=("--no-such-flag",))
    with pytest.raises(ServerStartError, match="ended with status 1"):
        EmbeddedServer(repository, ["orchestrator"], options=options).start()


def test_port_lost_to_a_faster_process_is_replaced(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as faster:
        lost = choose_ports("127.0.0.1", Ports(metrics=faster.getsockname()[1]))
        choices = itertools.chain([lost], itertools.repeat(Ports()))
        monkeypatch.setattr(launching, "choose_ports", lambda host, wanted: choose_ports(host, next(choices)))
        with EmbeddedServer(repository, ["orchestrator"], options=SMALL) as server:
            assert server.is_running()
            assert server.metrics_address != f"127.0.0.1:{lost.metrics}"


def test_dead_stage_comes_back_by_unload_and_load(shared_server: EmbeddedServer) -> None:
    for process_id in shared_server.stub_process_ids("orchestrator"):
        os.kill(process_id, signal.SIGKILL)
    assert wait_for(lambda: not shared_server.stub_process_ids("orchestrator"))
    shared_server.unload("orchestrator")
    shared_server.load("orchestrator", READY_TIMEOUT_S)
    assert shared_server.ask("again") == "again"


def test_drain_refuses_new_requests_and_waits_for_running_ones(shared_server: EmbeddedServer, tmp_path: Path) -> None:
    release, answers = tmp_path / "release", []
    client = threading.Thread(target=lambda: answers.append(shared_server.ask(f"wait:{release}")))
    client.start()
    assert wait_for(release.with_suffix(".running").exists)
    assert not shared_server.drain(timeout_s=0.5)
    with pytest.raises(UnavailableError):
        shared_server.ask("too late")
    release.touch()
    assert shared_server.drain(timeout_s=20.0)
    client.join(timeout=20.0)
    shared_server.load("orchestrator", READY_TIMEOUT_S)
    assert answers == [f"wait:{release}"]
