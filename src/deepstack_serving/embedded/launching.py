"""Starts a server process on ports that nobody else has, and waits until it answers."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from deepstack_serving.embedded.control import Control
from deepstack_serving.embedded.failures import PortInUseError, ServerStartError
from deepstack_serving.embedded.layout import (
    check_libraries,
    count_gpus,
    find_wheel,
    lay_out_backends,
    server_environment,
)
from deepstack_serving.embedded.options import Ports, ServerOptions, server_arguments
from deepstack_serving.embedded.ports import choose_ports, connect_host, first_taken
from deepstack_serving.embedded.process import ServerProcess
from deepstack_serving.regions import sweep_orphaned_regions

LOG_NAME = "tritonserver.log"
POLL_S = 0.02
_PORT_ATTEMPTS = 5
_GRACE_BEYOND_EXIT_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server whose endpoints answer. The addresses are those to connect to from this machine."""

    process: ServerProcess
    control: Control
    http_address: str
    grpc_address: str
    metrics_address: str


def launch(
    options: ServerOptions, model_repository: Path, environment: Mapping[str, str], run_directory: Path
) -> RunningServer:
    """Check what the server needs, sweep what an earlier one left, start; no model is loaded yet."""
    _check_wanted_ports(options)
    wheel = find_wheel(options.server_folder)
    complete_environment = server_environment(wheel, environment)
    check_libraries(wheel, complete_environment)
    sweep_orphaned_regions()
    backends = lay_out_backends(wheel, run_directory)

    def attempt() -> RunningServer | None:
        ports, server_id = choose_ports(options.host, options.ports), uuid.uuid4().hex
        arguments = server_arguments(options, ports, model_repository, backends, server_id, count_gpus())
        grace_s = options.exit_timeout_s + _GRACE_BEYOND_EXIT_TIMEOUT_S
        command = [str(wheel.executable), *arguments]
        process = ServerProcess(command, complete_environment, run_directory / LOG_NAME, grace_s)
        return _once_it_answers(process, options, ports, server_id)

    for _ in range(_PORT_ATTEMPTS):
        server = attempt()
        if server is not None:
            return server
    raise ServerStartError(f"found no free ports on {options.host} in {_PORT_ATTEMPTS} attempts")


def ended_error(process: ServerProcess) -> ServerStartError:
    """What to raise when the server ended by itself."""
    return ServerStartError(
        f"the server ended with status {process.exit_status()}; the last lines of {process.log_path}:\n"
        f"{process.log_tail()}"
    )


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Whether the condition came true in time."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(POLL_S)
    return True


def _check_wanted_ports(options: ServerOptions) -> None:
    taken = first_taken(options.host, options.ports)
    if taken is not None:
        raise PortInUseError(f"port {taken} of {options.host} is in use; choose another, or 0 for a free one")


def _once_it_answers(
    process: ServerProcess, options: ServerOptions, ports: Ports, server_id: str
) -> RunningServer | None:
    """The server, or None if another process was faster to take one of its ports."""
    host = connect_host(options.host)
    http, grpc, metrics = (f"{host}:{number}" for number in ports.numbers())
    control = Control(http, metrics)
    answered = wait_until(
        lambda: process.exit_status() is not None or control.answers_as(server_id), options.answer_timeout_s
    )
    if answered and process.exit_status() is None:
        return RunningServer(process, control, http, grpc, metrics)
    process.stop()
    if first_taken(options.host, ports) is not None:
        return None
    raise ended_error(process)
