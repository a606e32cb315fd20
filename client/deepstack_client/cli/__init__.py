"""The command `deepstack`: `chat` from this package, everything else from plug-ins.

Exit codes: 0 done, 1 failed with one line `error: ...`, 2 wrong usage, 130 interrupted by Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import EntryPoint

from deepstack_client.cli import chat, plugins
from deepstack_client.errors import ClientError
from deepstack_client.transports import transport_for


def main(
    argv: Sequence[str] | None = None,
    *,
    transport_factory: chat.TransportFactory = transport_for,
    commands: Iterable[EntryPoint] | None = None,
) -> int:
    """Runs one command line. The keyword arguments let a test put a fake server or fake plug-ins in place."""
    words = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(prog="deepstack", description="Ask, and serve, deepstack vision-language models.")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    chat.register(subparsers, transport_factory)
    installed = plugins.installed_commands() if commands is None else commands
    plugins.register_all(subparsers, installed, words[0] if words else None)
    return _run(parser.parse_args(words))


def _run(arguments: argparse.Namespace) -> int:
    try:
        code: int = arguments.run(arguments)
    except ClientError as error:
        line = " ".join(str(error).split())
        sys.stderr.write(f"error: {line}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output left; stdout must not be flushed again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code
