"""The command `deepstack serve`: runs the four models on the embedded server until SIGINT or SIGTERM, then drains."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from deepstack_serving.embedded import EmbeddedServer, EmbeddedServerError, Ports, ProgressDisplay, ServerOptions
from deepstack_serving.errors import DeepstackError, UnavailableError
from deepstack_serving.example_commands import commands_to_paste
from deepstack_serving.repository import model_names, stages_of
from deepstack_serving.settings import FILE_VARIABLE, PREFIX, load_settings
from deepstack_serving.wire import ORCHESTRATOR

_PROBE_TEXT = "Hello"
_FOLDER_NAME = "model_repository"


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the `deepstack` command line."""
    parser = subparsers.add_parser("serve", help="serve a checkpoint on this machine, without a container")
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help=f"same as {PREFIX}CHECKPOINT")
    parser.add_argument(
        "--model-repository",
        type=Path,
        metavar="DIR",
        help=f"with any number of language stages; default: ./{_FOLDER_NAME}, or the project's",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    for name, number in (("http", 8000), ("grpc", 8001), ("metrics", 8002)):
        parser.add_argument(
            f"--{name}-port", type=_port, default=number, metavar="N", help="0: a free one (%(default)s)"
        )
    parser.add_argument(
        "--setting",
        type=_setting,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help=f"same as {PREFIX}<KEY>=<VALUE>",
    )
    parser.add_argument("--run-directory", type=Path, metavar="DIR", help="keep the server's log here")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help="to become ready (%(default)g)")
    parser.add_argument("--until-ready-only", action="store_true", help="stop as soon as the server is ready")
    parser.add_argument("--example-image", default="picture.png", metavar="FILE", help="image in the printed commands")
    parser.add_argument("--example-question", default="What is in the picture?", metavar="TEXT")
    parser.add_argument(
        "--perf-analyzer", default="perf_analyzer", metavar="FILE", help="load generator, if it is there"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Exit code 0 after a stop by signal, 1 with one line on standard error when the server cannot run."""
    before = {number: signal.signal(number, _interrupt) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        _serve(arguments)
    except DeepstackError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    except KeyboardInterrupt:
        pass  # a signal before the server was up, or a second one while it drained
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    _write("stopped\n")
    return 0


def _serve(arguments: argparse.Namespace) -> None:
    options = ServerOptions(
        host=arguments.host,
        ports=Ports(arguments.http_port, arguments.grpc_port, arguments.metrics_port),
        run_directory=arguments.run_directory,
        entry_model=ORCHESTRATOR,
    )
    repository = _repository(arguments.model_repository)
    models = model_names(stages_of(repository))
    environment = _model_environment(arguments, models)
    with EmbeddedServer(repository, models, environment, options) as server:
        try:
            _serve_until_signal(server, arguments)
        except KeyboardInterrupt:
            _write("\nwaiting for running requests, then stopping\n")


def _serve_until_signal(server: EmbeddedServer, arguments: argparse.Namespace) -> None:
    _write(f"server started as process {server.process_id}, log in {server.log_path}\n")
    with ProgressDisplay(sys.stdout) as display:
        _wait_until_ready(server, arguments.timeout, display)
    _write(_announcement(server, arguments))
    if not arguments.until_ready_only:
        server.wait()
        raise server.ended_error()


def _wait_until_ready(server: EmbeddedServer, timeout_s: float, display: ProgressDisplay) -> None:
    try:
        server.wait_until_ready(timeout_s, lambda: server.ask(_PROBE_TEXT), display.show)
    except UnavailableError as error:
        if not server.is_running():  # the error of a server that has ended names the log itself
            raise
        raise EmbeddedServerError(f"{error}; the server's log is {server.log_path}") from error


def _announcement(server: EmbeddedServer, arguments: argparse.Namespace) -> str:
    image, question, perf_analyzer = arguments.example_image, arguments.example_question, arguments.perf_analyzer
    commands = commands_to_paste(server.http_address, server.grpc_address, image, question, perf_analyzer)
    addresses = f"HTTP {server.http_address}, gRPC {server.grpc_address}, metrics {server.metrics_address}"
    return f"ready: {addresses}\n\n{commands}\n\nCtrl-C stops the server\n"


def _model_environment(arguments: argparse.Namespace, models: Sequence[str]) -> dict[str, str]:
    """The variables that the models read. They are checked here first, where a refusal is seen at once."""
    chosen = {f"{PREFIX}{key.upper()}": value for key, value in arguments.setting}
    if arguments.checkpoint is not None:
        chosen[f"{PREFIX}CHECKPOINT"] = str(arguments.checkpoint)
    complete = {**os.environ, **chosen}
    settings = load_settings(complete)
    settings.check_devices(models)
    # The server's working folder is not the user's: relative paths are resolved while they mean something.
    chosen[f"{PREFIX}CHECKPOINT"] = str(settings.checkpoint.absolute())
    if FILE_VARIABLE in complete:
        chosen[FILE_VARIABLE] = str(Path(complete[FILE_VARIABLE]).absolute())
    return chosen


def _repository(wanted: Path | None) -> Path:
    candidates = [wanted] if wanted else [Path(_FOLDER_NAME), Path(__file__).parents[2] / _FOLDER_NAME]
    found = next((folder for folder in candidates if folder.is_dir()), None)
    if found is None:
        tried = ", ".join(str(folder) for folder in candidates)
        raise EmbeddedServerError(f"no model repository at {tried}; name one with --model-repository")
    return found


def _port(text: str) -> int:
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 0 to 65535")
    return int(text)


def _setting(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return key, value


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
