"""How the embedded server is run, and the command line that follows from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_MEBIBYTE = 1 << 20


@dataclass(frozen=True, slots=True)
class Ports:
    """The three TCP ports of one server; 0 asks for a free one."""

    http: int = 0
    grpc: int = 0
    metrics: int = 0

    def numbers(self) -> tuple[int, int, int]:
        return self.http, self.grpc, self.metrics


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Settings of the server itself; settings of the models travel in the environment.

    `entry_model` is the one that clients call: draining unloads it first, which refuses new requests and leaves the
    running ones alone. `active_gauge` is the metric that counts the running ones.
    """

    host: str = "127.0.0.1"
    ports: Ports = Ports()
    # Every blocking BLS call and every response send of one model holds one thread of that model's pool.
    thread_pool_size: int = 128
    # The default region is really allocated, once per model instance; a region never shrinks.
    shared_memory_bytes: int = 64 * _MEBIBYTE
    shared_memory_growth_bytes: int = 64 * _MEBIBYTE
    # On every GPU, for tensors that cross between models: 8 images of 1,024 tokens, 4 tensors of 4,096 bfloat16 values
    # each. What finds no room there gets memory of its own for the one crossing, which is right and slower.
    cuda_memory_pool_bytes: int = 256 * _MEBIBYTE
    exit_timeout_s: int = 30
    answer_timeout_s: float = 60.0
    run_directory: Path | None = None
    server_folder: Path | None = None  # the server's unpacked parts; None: those of the installed wheel
    entry_model: str = "orchestrator"
    active_gauge: str = "deepstack_active_requests"
    extra_arguments: tuple[str, ...] = ()


def server_arguments(
    options: ServerOptions, ports: Ports, model_repository: Path, backend_directory: Path, server_id: str, gpus: int = 0
) -> list[str]:
    """The server's flags. No model is named here: each is loaded by name once the server answers."""
    backend = {
        "thread-pool-size": options.thread_pool_size,
        "shm-default-byte-size": options.shared_memory_bytes,
        "shm-growth-byte-size": options.shared_memory_growth_bytes,
    }
    return [
        f"--id={server_id}",
        f"--model-repository={model_repository}",
        "--model-control-mode=explicit",
        f"--backend-directory={backend_directory}",
        f"--exit-timeout-secs={options.exit_timeout_s}",
        *(f"--{name}-address={options.host}" for name in ("http", "grpc", "metrics")),
        f"--http-port={ports.http}",
        f"--grpc-port={ports.grpc}",
        f"--metrics-port={ports.metrics}",
        *(f"--backend-config=python,{key}={value}" for key, value in backend.items()),
        *(f"--cuda-memory-pool-byte-size={gpu}:{options.cuda_memory_pool_bytes}" for gpu in range(gpus)),
        *options.extra_arguments,
    ]
