"""Free TCP ports for the embedded server.

A port found free can be taken before the server binds it; the caller therefore starts again with other ports when the
server ended and `first_taken` finds one of its ports in other hands.
"""

from __future__ import annotations

import contextlib
import socket

from deepstack_serving.embedded.options import Ports


def choose_ports(host: str, wanted: Ports) -> Ports:
    """The wanted ports with each 0 replaced by a free port; no two are equal."""
    with contextlib.ExitStack() as held:
        chosen = [number or _hold_free_port(host, held) for number in wanted.numbers()]
    return Ports(*chosen)


def first_taken(host: str, ports: Ports) -> int | None:
    """The first port that cannot be bound now."""
    return next((number for number in ports.numbers() if not _can_bind(host, number)), None)


def connect_host(host: str) -> str:
    """The address under which this machine reaches a server bound to `host`."""
    return "127.0.0.1" if host == "0.0.0.0" else host


def _hold_free_port(host: str, held: contextlib.ExitStack) -> int:
    probe = held.enter_context(socket.socket())
    probe.bind((host, 0))
    number: int = probe.getsockname()[1]
    return number


def _can_bind(host: str, number: int) -> bool:
    with socket.socket() as probe:
        # As the server does: connections of an earlier server that linger in TIME_WAIT do not count as taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, number))
        except OSError:
            return False
    return True
