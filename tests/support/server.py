"""The four models on the real tritonserver: start them, hold them, end them, read their metrics."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

from deepstack_serving.embedded import EmbeddedServer, ServerOptions
from deepstack_serving.embedded.launching import wait_until
from tests.support.raw_client import PATIENCE_S, connect

REPOSITORY = Path(__file__).parents[2] / "model_repository"
STAGES = ("vision_encoder", "language_early", "language_late")
MODELS = (*STAGES, "orchestrator")
READY_TIMEOUT_S = 120.0

# Stopping the process itself would end the server: it gives up on a model that shows no sign of life for a second.
GATE = """

class TritonPythonModel(TritonPythonModel):
    def execute(self, requests):
        import time
        from pathlib import Path

        is_work = any("stage_info" not in request.requested_output_names() for request in requests)
        while is_work and Path("{name}").exists():
            time.sleep(0.005)
        return super().execute(requests)
"""


ZEROED = """

class TritonPythonModel(TritonPythonModel):
    def execute(self, requests):
        import torch
        import triton_python_backend_utils as pb_utils

        def sent(tensor):
            zeros = torch.zeros_like(torch.from_dlpack(tensor)) if tensor.name().startswith("ds_") else None
            return tensor if zeros is None else pb_utils.Tensor.from_dlpack(tensor.name(), zeros)

        return [
            response if response.has_error() else pb_utils.InferenceResponse(list(map(sent, response.output_tensors())))
            for response in super().execute(requests)
        ]
"""


@contextlib.contextmanager
def serving(
    checkpoint: Path,
    run_directory: Path,
    repository: Path = REPOSITORY,
    models: tuple[str, ...] = MODELS,
    server_folder: Path | None = None,
    **settings: object,
) -> Iterator[EmbeddedServer]:
    """A started server with all models loaded, its log in `run_directory`; `settings` by their names."""
    options = ServerOptions(run_directory=run_directory, server_folder=server_folder, exit_timeout_s=5)
    with EmbeddedServer(repository, models, environment(checkpoint, **settings), options) as server:
        server.wait_until_ready(READY_TIMEOUT_S)
        yield server


def environment(checkpoint: Path, **settings: object) -> dict[str, str]:
    """The settings as the models read them."""
    values = {"checkpoint": checkpoint, "device": "cpu", "cpu_threads": 1, "kv_pool_tokens": 3072, **settings}
    return {f"DEEPSTACK_{name.upper()}": str(value) for name, value in values.items()}


def eventually(condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> bool:
    """Whether the condition came true before the deadline."""
    return wait_until(condition, timeout_s)


def gauges(server: EmbeddedServer) -> dict[str, float]:
    """The orchestrator's own metrics, without their prefix."""
    connection = connect(server.metrics_address)
    with contextlib.closing(connection):
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    return {name: float(value) for name, value in re.findall(r"^deepstack_(\w+)(?:\{.*\})? (\S+)$", text, re.MULTILINE)}


def reaches(server: EmbeddedServer, timeout_s: float = PATIENCE_S, **values: float) -> bool:
    """Whether the metrics come to these values before the deadline."""
    return eventually(lambda: values.items() <= gauges(server).items(), timeout_s)


def is_whole(server: EmbeddedServer) -> bool:
    """Whether nobody waits and all blocks come back."""
    nobody = {"active_requests": 0.0, "waiting_requests": 0.0, "running_requests": 0.0}

    def whole() -> bool:
        values = gauges(server)  # a moment after the start they still say that there are no blocks
        return nobody.items() <= values.items() and 0 < values["kv_blocks_total"] == values["kv_blocks_free"]

    return eventually(whole)


def gated_repository(folder: Path) -> Path:
    """A copy of the model repository that tests may change, whose stages can be `held`."""
    shutil.copytree(REPOSITORY, folder, ignore=shutil.ignore_patterns("__pycache__"))
    for stage in STAGES:
        with (folder / stage / "1" / "model.py").open("a") as file:
            file.write(GATE.format(name=_gate_name(stage)))
    return folder


@contextlib.contextmanager
def held(server: EmbeddedServer, model: str) -> Iterator[None]:
    """Hold a stage of a gated repository, so that calls to it do not come back meanwhile."""
    gate = server.log_path.parent / _gate_name(model)
    gate.touch()
    try:
        yield
    finally:
        gate.unlink()


def kill(server: EmbeddedServer, model: str) -> None:
    """End a model's processes as an out-of-memory killer does."""
    for process_id in server.stub_process_ids(model):
        os.kill(process_id, signal.SIGKILL)


def reload(server: EmbeddedServer, model: str) -> None:
    """What an operator does with a dead stage."""
    server.unload(model)
    server.load(model, READY_TIMEOUT_S)


def _gate_name(model: str) -> str:
    return f"{model}.gate"  # in the server's working folder


def zeroing_repository(folder: Path, model: str) -> Path:
    """A copy of the model repository in which everything of deepstack that one model sends is zero."""
    shutil.copytree(REPOSITORY, folder, ignore=shutil.ignore_patterns("__pycache__"))
    with (folder / model / "1" / "model.py").open("a") as file:
        file.write(ZEROED)
    return folder
