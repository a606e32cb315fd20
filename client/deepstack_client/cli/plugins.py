"""Subcommands from other distributions: entry points of the group "deepstack.commands".

Each value is a function `register(subparsers)` that adds its subparser and sets `run` on it, a function that takes the
parsed arguments and returns the exit code.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points

from deepstack_client.cli.chat import Subparsers

GROUP = "deepstack.commands"
_PROVIDERS = dict.fromkeys(("serve", "repository", "plan", "audit"), "deepstack-serving")


def installed_commands() -> list[EntryPoint]:
    return list(entry_points(group=GROUP))


def register_all(subparsers: Subparsers, commands: Iterable[EntryPoint], wanted: str | None) -> None:
    """Adds the commands. Only the wanted one is imported: others may be heavy, and must not break this one."""
    by_name = {command.name: command for command in commands}
    for name, command in by_name.items():
        if name == wanted:
            command.load()(subparsers)
        elif name not in subparsers.choices:
            subparsers.add_parser(name, help=f"see deepstack {name} --help")
    for name, distribution in _PROVIDERS.items():
        if name not in by_name:
            _register_missing(subparsers, name, distribution)


def _register_missing(subparsers: Subparsers, name: str, distribution: str) -> None:
    # No word starts with this prefix, so whatever follows the name is accepted: the reason matters, not the usage.
    parser = subparsers.add_parser(name, help=f"(install {distribution})", add_help=False, prefix_chars="\0")
    parser.add_argument("words", nargs="*")
    parser.set_defaults(run=lambda _: _explain_missing(name, distribution))


def _explain_missing(name: str, distribution: str) -> int:
    sys.stderr.write(f"error: the command {name!r} is not installed: install {distribution}\n")
    return 1
