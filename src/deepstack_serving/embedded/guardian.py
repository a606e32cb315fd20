"""The parent of one embedded server: it ends the server when its own parent ends, and cleans up after either.

Run as `python -m deepstack_serving.embedded.guardian GRACE_S LOG COMMAND...`. Standard input is the life line: when it
closes, because the launcher asked for a stop or because the launcher is dead, for whatever reason, the server gets
SIGTERM, and its whole group SIGKILL after GRACE_S seconds. One line on standard output tells the server's process id.
The server's stubs, which a crash would leave behind, are killed and its shared memory is removed. If the guardian
itself is killed, the kernel sends the server SIGTERM (that signal is tied to the starting thread; here it is the only).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from deepstack_serving.regions import region_prefix, sweep_orphaned_regions, sweep_regions

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_EXEC_FAILED = 127
# Triton 2.51's HTTP threads parse a form (what curl and urllib call a body unless told otherwise) on their stack,
# taking twice its size, and overflowing it ends the server: 4 MB did with the usual 8 MiB.
_STACK_BYTES = 1 << 30


def guard(grace_s: float, log_path: Path, command: Sequence[str]) -> int:
    """Start the server, wait for its end, clean up; returns a shell-like exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C belongs to the launcher, which then drains
    server_id = _start(log_path, command)
    sys.stdout.write(f"{server_id}\n")
    sys.stdout.flush()
    threading.Thread(target=_stop_when_input_closes, args=(server_id, grace_s), daemon=True).start()
    # The server is left a zombie while its group is killed, so that its group id cannot come to mean another one.
    os.waitid(os.P_PID, server_id, os.WEXITED | os.WNOWAIT)
    _kill_group(server_id)
    status = os.waitstatus_to_exitcode(os.waitpid(server_id, 0)[1])
    _reap_group(server_id)
    sweep_regions(server_id)
    sweep_orphaned_regions()  # what the server's own processes made
    return status if status >= 0 else 128 - status


def _start(log_path: Path, command: Sequence[str]) -> int:
    guardian_id = os.getpid()
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    server_id = os.fork()
    if server_id == 0:
        _become_server(libc, guardian_id, log, command)
    os.close(log)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.setpgid(server_id, server_id)
    return server_id


def _become_server(libc: ctypes.CDLL, guardian_id: int, log: int, command: Sequence[str]) -> NoReturn:
    try:
        os.setpgid(0, 0)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() == guardian_id:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            _raise_stack_limit()
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(log, 1)
            os.dup2(log, 2)
            prefix = f"--backend-config=python,shm-region-prefix-name={region_prefix(os.getpid())}"
            os.execv(command[0], [*command, prefix])
    finally:
        os._exit(_EXEC_FAILED)


def _raise_stack_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    wanted = _STACK_BYTES if hard == resource.RLIM_INFINITY else min(_STACK_BYTES, hard)
    if soft < wanted:  # -1, no limit, gives threads only 2 MiB
        resource.setrlimit(resource.RLIMIT_STACK, (wanted, hard))


def _stop_when_input_closes(server_id: int, grace_s: float) -> None:
    while os.read(0, 1024):
        pass
    with contextlib.suppress(ProcessLookupError):
        os.kill(server_id, signal.SIGTERM)
    time.sleep(grace_s)
    _kill_group(server_id)


def _kill_group(server_id: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server_id, signal.SIGKILL)


def _reap_group(server_id: int) -> None:
    """Wait for the killed stubs, which became children of this process when the server ended."""
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-server_id, 0)


if __name__ == "__main__":
    sys.exit(guard(float(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
