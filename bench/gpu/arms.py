"""An arm is a process that measures something and writes a JSON line per phase; memory is free again when it has ended.

A phase that fails or takes too long is recorded with its error, and the next one runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

from bench.failures import BenchError
from bench.serving import PROJECT, say

_KILL_GRACE_S = 60.0  # the server ends after its arm, and only then is the GPU free
_ERROR_LENGTH = 2000


@dataclass(frozen=True)
class Command:
    """How to start an arm, and the seconds that it may take."""

    name: str
    command: Sequence[str]
    limit_s: float
    read: Callable[[str], list[dict[str, Any]]] | None = None  # phases of a foreign tool's output

    @staticmethod
    def of_module(name: str, module: str, arguments: Sequence[str], limit_s: float) -> Command:
        return Command(name, [sys.executable, "-m", module, *arguments], limit_s)


def emit(phase: str, result: Any, seconds: float | None = None) -> None:
    """One phase's result, as a line of standard output."""
    _write({"phase": phase, "seconds": seconds, "result": result})


class Phases:
    """Runs the phases of one arm. `limit_s` holds for each; a phase may have its own."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s

    def run(self, phase: str, measure: Callable[[], Any], limit_s: float | None = None) -> Any:
        """The result, which is also written; None when the phase failed."""
        say(f"{phase} ...")
        started_s = time.perf_counter()
        try:
            with time_limit(limit_s or self._limit_s):
                result = measure()
        except SystemExit:
            self._failed(phase, started_s, "the arm was stopped meanwhile")
            raise
        except Exception as error:  # noqa: BLE001 - whatever one phase meets, the others are to be measured
            self._failed(phase, started_s, f"{type(error).__name__}: {error}")
            return None
        say(f"{phase}: {_since(started_s)} s")
        emit(phase, result, _since(started_s))
        return result

    def _failed(self, phase: str, started_s: float, error: str) -> None:
        say(f"{phase} failed after {_since(started_s)} s: {error}")
        _write({"phase": phase, "seconds": _since(started_s), "error": error[-_ERROR_LENGTH:]})


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises BenchError in the main thread once the time is over; a call into C is interrupted when it returns."""

    def expire(_number: int, _frame: FrameType | None) -> NoReturn:
        raise BenchError(f"not done after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run_arm(arm: Command) -> dict[str, Any]:
    """Run it to its end or its limit; its phases, and an error when it did not end well.

    What a foreign tool prints in place of phases is in `other_output`, its last lines.
    """
    say(f"== {arm.name}: at most {arm.limit_s:.0f} s")
    started_s = time.perf_counter()
    record: dict[str, Any] = {"arm": arm.name}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(arm.command, cwd=PROJECT, stdout=output, text=True, start_new_session=True)
        try:
            status = process.wait(arm.limit_s)
            if status:
                record["error"] = f"ended with status {status}"
        except subprocess.TimeoutExpired:
            record["error"] = f"stopped after {arm.limit_s:.0f} s"
        finally:
            _end(process)
        output.seek(0)
        text = output.read()
    record |= {
        "seconds": _since(started_s),
        "phases": (arm.read or parse_phases)(text),
        "other_output": other_lines(text),
    }
    say(f"== {arm.name}: {record['seconds']} s{', ' + record['error'] if 'error' in record else ''}")
    return record


def parse_phases(text: str) -> list[dict[str, Any]]:
    """The phases among the lines of an arm's output; a line that was cut off by the end of its process is left out."""
    phases = []
    for line in text.splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            value = json.loads(line)
            if isinstance(value, dict) and "phase" in value:
                phases.append(value)
    return phases


def other_lines(text: str) -> list[str]:
    """What an arm printed besides its phases, as foreign tools do."""
    return [line for line in text.splitlines() if line.strip() and not parse_phases(line)][-40:]


def _end(process: subprocess.Popen[str]) -> None:
    """SIGTERM, so that a server drains; SIGKILL of the arm and all that it started when it does not end."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_KILL_GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _write(value: dict[str, Any]) -> None:
    print(json.dumps(value), flush=True)


def _since(started_s: float) -> float:
    return round(time.perf_counter() - started_s, 2)
