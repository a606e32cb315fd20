"""The server that is measured: an embedded one for the time of a run, or one that already runs."""

from __future__ import annotations

import json
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from deepstack_serving.embedded import EmbeddedServer, Progress, ServerOptions
from deepstack_serving.repository import model_names, pipelines_of

PROJECT = Path(__file__).parents[1]
MODELS = model_names()
CACHE = PROJECT / "build" / "bench"
RESULTS = CACHE / "results"
DEMO_CHECKPOINT = PROJECT / "demo" / "checkpoints" / "qwen3_vl_digits"
_START_LIMIT_S = 600.0
_CALL_LIMIT_S = 30.0
_TIMES = ("queue", "compute_input", "compute_infer", "compute_output")


@dataclass(frozen=True)
class Addresses:
    """host:port of the two endpoints."""

    grpc: str
    http: str


@dataclass(frozen=True)
class ModelStatistics:
    """Triton's own counts of one model since its start; times in nanoseconds, summed over executions."""

    executions: int
    compute_infer_ns: int
    failures: int
    queue_ns: int = 0
    compute_input_ns: int = 0
    compute_output_ns: int = 0

    def since(self, before: ModelStatistics) -> ModelStatistics:
        return ModelStatistics(*(mine - theirs for mine, theirs in zip(astuple(self), astuple(before), strict=True)))


@contextmanager
def embedded_server(
    checkpoint: Path,
    environment: Mapping[str, str] | None = None,
    repository: Path = PROJECT / "model_repository",
    options: ServerOptions | None = None,
) -> Iterator[EmbeddedServer]:
    """A ready server of a model repository, the project's own by default; says on standard error what it waits for."""
    variables = {"DEEPSTACK_CHECKPOINT": str(checkpoint.absolute()), **(environment or {})}
    with EmbeddedServer(repository, pipelines_of(repository).models, variables, options) as server:
        server.wait_until_ready(_START_LIMIT_S, lambda: server.ask("Hello"), _Waiting())
        say(f"server ready: gRPC {server.grpc_address}, HTTP {server.http_address}")
        yield server


def addresses_of(server: EmbeddedServer) -> Addresses:
    """Where an embedded server answers."""
    return Addresses(server.grpc_address, server.http_address)


def statistics_of(http_address: str, model: str) -> ModelStatistics:
    """One model's counts so far."""
    with urllib.request.urlopen(f"http://{http_address}/v2/models/{model}/stats", timeout=_CALL_LIMIT_S) as reply:
        return parse_statistics(json.load(reply))


def parse_statistics(content: Any) -> ModelStatistics:
    """From the JSON of Triton's statistics extension."""
    model = content["model_stats"][0]
    times = model["inference_stats"]
    failures = int(times["fail"]["count"])
    nanoseconds = {f"{name}_ns": int(times.get(name, {}).get("ns", 0)) for name in _TIMES}
    return ModelStatistics(executions=int(model["execution_count"]), failures=failures, **nanoseconds)


def say(text: str) -> None:
    """Progress goes to standard error: standard output is for the table."""
    print(text, file=sys.stderr, flush=True)


class _Waiting:
    """Says what a start waits for, a line per change."""

    def __init__(self) -> None:
        self._pending: tuple[str, ...] | None = None

    def __call__(self, progress: Progress) -> None:
        if progress.pending != self._pending:
            what = f"loading {', '.join(progress.pending)}" if progress.pending else "waiting for the first answer"
            say(f"{what} ... {progress.elapsed_s:.0f} s")
        self._pending = progress.pending
