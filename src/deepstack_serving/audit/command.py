"""The command `deepstack audit`: do visual features reach the answers of a running server, eagerly and in graphs?

Exit codes: 0 PASS, 1 FAIL, 2 VACUOUS (the audit proves nothing), 3 it could not run.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deepstack_client import Client, ClientError
from deepstack_client.client import DEFAULT_ADDRESS, DEFAULT_TIMEOUT_S
from deepstack_serving.audit_protocol import SETTING
from deepstack_serving.command_line import setting
from deepstack_serving.deployment import add_deployment_arguments, deployment_of, wait_until_ready
from deepstack_serving.embedded import EmbeddedServer, ProgressDisplay
from deepstack_serving.errors import DeepstackError

COULD_NOT_RUN = 3


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the `deepstack` command line."""
    parser = subparsers.add_parser(
        "audit",
        help="show that visual features reach the answers of a server",
        description="Asks a server that has the setting audit_parameters = true the same generated pictures with and "
        "without deepstack features, eagerly and in graphs, and compares the answers. Exit code 0 PASS, 1 FAIL, "
        "2 VACUOUS, 3 could not run.",
    )
    parser.add_argument("--address", default=DEFAULT_ADDRESS, help="grpc://host:port or http://host:port (%(default)s)")
    parser.add_argument("--timeout", type=float, default=DEFAULT_TIMEOUT_S, metavar="SECONDS", help="(%(default)g)")
    parser.add_argument(
        "--start-server", action="store_true", help="audit an embedded server instead, started and stopped for it"
    )
    add_deployment_arguments(parser)
    parser.add_argument("--start-timeout", type=float, default=600.0, metavar="SECONDS", help="(%(default)g)")
    parser.add_argument(
        "--max-tokens", type=setting("default_max_tokens"), default=16, metavar="N", help="of an answer (%(default)s)"
    )
    parser.add_argument(
        "--tolerance", type=_tolerance, metavar="X", help="in log-probability; default: by the server's number type"
    )
    parser.add_argument("--pairs", action="store_true", help="show every pair of answers, not only those of bad checks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything to this file")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """The exit code of the verdict; COULD_NOT_RUN with one line on standard error where there is none."""
    try:
        with _address(arguments) as address:
            return _audit(arguments, address)
    except (ClientError, DeepstackError, OSError) as error:
        sys.stderr.write(f"error: the audit could not run: {' '.join(str(error).split())}\n")
        return COULD_NOT_RUN


def _audit(arguments: argparse.Namespace, address: str) -> int:
    from deepstack_serving.audit.asking import describe, record  # with cases, which take numpy and Pillow
    from deepstack_serving.audit.cases import cases
    from deepstack_serving.audit.report import as_json, as_text
    from deepstack_serving.audit.verdict import EXIT_CODES, judge

    asked = cases()
    with Client(address, timeout_s=arguments.timeout) as client:
        server = describe(client)
        records = record(client, server, asked, arguments.max_tokens, lambda arm: _say(str(arm)))
    audit = judge(records, asked, server, arguments.tolerance)
    if arguments.json is not None:
        arguments.json.write_text(as_json(audit, server, records))
    sys.stdout.write(as_text(audit, server, pairs=arguments.pairs))
    return EXIT_CODES[audit.verdict]


@contextmanager
def _address(arguments: argparse.Namespace) -> Iterator[str]:
    """Of the running server, or of one that runs as long as the context."""
    if not arguments.start_server:
        yield arguments.address
        return
    with EmbeddedServer(*deployment_of(arguments, {SETTING: "true"})) as server:
        with ProgressDisplay(sys.stderr) as display:
            wait_until_ready(server, arguments.start_timeout, display.show)
        yield f"grpc://{server.grpc_address}"


def _say(text: str) -> None:
    sys.stderr.write(f"asking: {text}\n")


def _tolerance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; allowed: a number from 0")
    return value
