"""One server process with its guardian: start, watch, end. Knows nothing of models or requests."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from deepstack_serving.embedded.failures import ServerStartError
from deepstack_serving.regions import sweep_regions

_GUARDIAN = "deepstack_serving.embedded.guardian"
_CLEAN_UP_S = 10.0
_TAIL_LINES = 15
_TABLE_EDGES = ("+", "|")
_STUB_NAME = "triton_python_backend_stub"


class ServerProcess:
    """Owns the guardian, and through it the server and its stubs (one process group)."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log_path: Path,
        grace_s: float,
    ) -> None:
        self.log_path = log_path
        self._grace_s = grace_s
        # The guardian gets a session of its own: a Ctrl-C in the terminal reaches the launcher alone.
        self._guardian = subprocess.Popen(
            [sys.executable, "-P", "-m", _GUARDIAN, str(grace_s), str(log_path), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=log_path.parent,
            env=dict(environment),
            start_new_session=True,
        )
        self.process_id = self._read_process_id()

    def exit_status(self) -> int | None:
        """None while the server runs."""
        return self._guardian.poll()

    def wait(self) -> int:
        """Block until the server has ended; returns its exit status."""
        return self._guardian.wait()

    def stop(self) -> int:
        """End the server: SIGTERM, SIGKILL of the group after the grace time; returns its exit status."""
        if self._guardian.stdin is not None:
            self._guardian.stdin.close()
        try:
            status = self._guardian.wait(self._grace_s + _CLEAN_UP_S)
        except subprocess.TimeoutExpired:
            self._guardian.kill()
            status = self._guardian.wait()
        if status < 0:
            self._finish_for_guardian()
        return status

    def kill(self) -> int:
        """End the server at once; its guardian still cleans up."""
        if self.exit_status() is None:
            self._kill_group()
        return self.stop()

    def log_tail(self) -> str:
        """The last lines of the log, for an error's text."""
        lines = self.log_path.read_text(errors="replace").splitlines() if self.log_path.exists() else []
        telling = [line for line in lines if line.strip() and not line.startswith(_TABLE_EDGES)]
        return "\n".join(telling[-_TAIL_LINES:])

    def stub_process_ids(self, model: str) -> list[int]:
        """The processes that run one model's Python code."""
        return [child for child in children_of(self.process_id) if model_of_stub(command_line(child)) == model]

    def _read_process_id(self) -> int:
        if self._guardian.stdout is None:
            raise ServerStartError("the guardian of the server has no output")
        with self._guardian.stdout as output:
            line = output.readline()
        if not line:
            raise ServerStartError(f"the guardian of the server ended with status {self._guardian.wait()}")
        return int(line)

    def _finish_for_guardian(self) -> None:
        """A guardian that was killed has neither ended the server for certain nor cleaned up."""
        self._kill_group()
        sweep_regions(self.process_id)

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process_id, signal.SIGKILL)


def children_of(process_id: int) -> list[int]:
    """The direct children of a process."""
    known = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())
    return sorted(child for child in known if _parent_of(child) == process_id)


def command_line(process_id: int) -> list[str]:
    return _read(Path("/proc", str(process_id), "cmdline")).split("\0")


def model_of_stub(arguments: Sequence[str]) -> str | None:
    """The model that a stub runs, from its `<repository>/<model>/<version>/model.py`; None for another program."""
    if len(arguments) < 2 or Path(arguments[0]).name != _STUB_NAME:
        return None
    return Path(arguments[1]).parent.parent.name


def _parent_of(process_id: int) -> int | None:
    # The command's name stands in brackets and may hold anything; state and parent follow it.
    after_name = _read(Path("/proc", str(process_id), "stat")).rpartition(")")[2].split()
    return int(after_name[1]) if after_name else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
