"""The command `deepstack serve`: runs the four models on the embedded server until SIGINT or SIGTERM, then drains."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import NoReturn

from deepstack_serving.deployment import add_deployment_arguments, deployment_of, wait_until_ready
from deepstack_serving.embedded import EmbeddedServer, Ports, ProgressDisplay, ServerOptions
from deepstack_serving.errors import DeepstackError
from deepstack_serving.example_commands import commands_to_paste
from deepstack_serving.wire import ORCHESTRATOR


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the `deepstack` command line."""
    parser = subparsers.add_parser("serve", help="serve a checkpoint on this machine, without a container")
    add_deployment_arguments(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    for name, number in (("http", 8000), ("grpc", 8001), ("metrics", 8002)):
        parser.add_argument(
            f"--{name}-port", type=_port, default=number, metavar="N", help="0: a free one (%(default)s)"
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
    with EmbeddedServer(*deployment_of(arguments), options) as server:
        try:
            _serve_until_signal(server, arguments)
        except KeyboardInterrupt:
            _write("\nwaiting for running requests, then stopping\n")


def _serve_until_signal(server: EmbeddedServer, arguments: argparse.Namespace) -> None:
    _write(f"server started as process {server.process_id}, log in {server.log_path}\n")
    with ProgressDisplay(sys.stdout) as display:
        wait_until_ready(server, arguments.timeout, display.show)
    _write(_announcement(server, arguments))
    if not arguments.until_ready_only:
        server.wait()
        raise server.ended_error()


def _announcement(server: EmbeddedServer, arguments: argparse.Namespace) -> str:
    image, question, perf_analyzer = arguments.example_image, arguments.example_question, arguments.perf_analyzer
    commands = commands_to_paste(server.http_address, server.grpc_address, image, question, perf_analyzer)
    addresses = f"HTTP {server.http_address}, gRPC {server.grpc_address}, metrics {server.metrics_address}"
    return f"ready: {addresses}\n\n{commands}\n\nCtrl-C stops the server\n"


def _port(text: str) -> int:
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 0 to 65535")
    return int(text)


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
