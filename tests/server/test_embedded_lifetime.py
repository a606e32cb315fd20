"""How the embedded server ends, in order or not: nothing of it may stay behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deepstack_serving.embedded import EmbeddedServer, ServerOptions
from deepstack_serving.embedded.control import Control
from deepstack_serving.errors import UnavailableError
from deepstack_serving.regions import REGION_DIRECTORY, region_prefix, sweep_orphaned_regions

READY_TIMEOUT_S = 60.0
# An exit timeout far beyond the tests' patience: an end that waits for it fails.
OPTIONS = ServerOptions(shared_memory_bytes=1 << 20, shared_memory_growth_bytes=1 << 20, exit_timeout_s=300)

CONFIG = """
backend: "python"
max_batch_size: 0
input [ { name: "x" data_type: TYPE_INT32 dims: [ -1 ] } ]
output [ { name: "y" data_type: TYPE_INT32 dims: [ -1 ] } ]
instance_group [ { kind: KIND_CPU count: 1 } ]
"""
IDLE_MODEL = """
class TritonPythonModel:
    def execute(self, requests):
        return []
"""
SLOW_MODEL = """
import time
from pathlib import Path

class TritonPythonModel:
    def initialize(self, args):
        Path("{started}").touch()
        time.sleep(600)
"""


def write_model(repository: Path, name: str, source: str) -> None:
    version = repository / name / "1"
    version.mkdir(parents=True)
    version.joinpath("model.py").write_text(source)
    version.parent.joinpath("config.pbtxt").write_text(CONFIG)


def wait_for(condition: Callable[[], bool], timeout_s: float = 20.0) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return condition()


def regions(process_id: int) -> list[Path]:
    return list(REGION_DIRECTORY.glob(f"{region_prefix(process_id)}*"))


def load_in_vain(server: EmbeddedServer, model: str) -> None:
    with contextlib.suppress(UnavailableError):
        server.load(model)


def status_of(process_id: int) -> list[str]:
    """State, parent and so on; empty when there is no such process."""
    try:
        return Path("/proc", str(process_id), "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def parent_of(process_id: int) -> int:
    return int(status_of(process_id)[1])


def has_ended(process_id: int) -> bool:
    status = status_of(process_id)
    return not status or status[0] == "Z"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    write_model(folder, "orchestrator", IDLE_MODEL)
    return folder


@pytest.fixture
def own_server(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EmbeddedServer]:
    """A server for a test that ends it or breaks it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with EmbeddedServer(repository, ["orchestrator"], options=OPTIONS) as server:
        server.wait_until_ready(READY_TIMEOUT_S)
        yield server


def test_stop_ends_the_server_and_leaves_nothing(own_server: EmbeddedServer) -> None:
    process_id, run_directory = own_server.process_id, own_server.log_path.parent
    stubs = own_server.stub_process_ids("orchestrator")
    own_server.stop()
    assert stubs
    assert all(has_ended(number) for number in (process_id, *stubs))
    assert not regions(process_id)
    assert not run_directory.exists()


def test_interrupted_load_does_not_hold_up_the_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    started = tmp_path / "started"
    write_model(tmp_path, "slow", SLOW_MODEL.format(started=str(started)))
    with EmbeddedServer(tmp_path, ["slow"], options=OPTIONS) as server:
        process_id = server.process_id
        threading.Thread(target=load_in_vain, args=(server, "slow")).start()
        assert wait_for(started.exists)
    assert has_ended(process_id)
    assert not regions(process_id)


def test_killed_server_takes_its_stubs_and_regions_with_it(own_server: EmbeddedServer) -> None:
    process_id = own_server.process_id
    stubs = own_server.stub_process_ids("orchestrator")
    for number in stubs:
        os.kill(number, signal.SIGSTOP)  # one that is stuck does not notice that its server is gone
    os.kill(process_id, signal.SIGKILL)
    own_server.wait()
    assert all(has_ended(number) for number in stubs)
    assert not regions(process_id)


def test_regions_that_nobody_could_clean_up_are_swept_by_the_next_start(own_server: EmbeddedServer) -> None:
    process_id = own_server.process_id
    os.kill(process_id, signal.SIGSTOP)
    guardian_id = parent_of(process_id)
    for number in (*own_server.stub_process_ids("orchestrator"), guardian_id, process_id):
        os.kill(number, signal.SIGKILL)
    assert wait_for(lambda: has_ended(process_id))
    left = regions(process_id)
    sweep_orphaned_regions()
    assert left
    assert not regions(process_id)


LAUNCHER = """
import json, sys, threading
from pathlib import Path
from deepstack_serving.embedded import EmbeddedServer, ServerOptions
options = ServerOptions(shared_memory_bytes=1 << 20, run_directory=Path(sys.argv[2]))
def start():
    server = EmbeddedServer(Path(sys.argv[1]), ["orchestrator"], {}, options).start()
    server.wait_until_ready(60)
    print(json.dumps([server.process_id, *server.stub_process_ids("orchestrator"), server.http_address]), flush=True)
starter = threading.Thread(target=start)  # the server is not to end with the thread that started it
starter.start()
starter.join()
sys.stdin.readline()
"""


def test_killed_launcher_takes_the_server_with_it(repository: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", LAUNCHER, str(repository), str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        facts: list[Any] = json.loads(launcher.stdout.readline())
        *process_ids, http_address = facts
        assert Control(http_address, http_address).is_model_ready("orchestrator")
        launcher.kill()
    assert wait_for(lambda: all(has_ended(number) for number in process_ids))
    assert wait_for(lambda: not regions(process_ids[0]))
