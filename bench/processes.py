"""Runs the measuring processes of the CPU benchmark and speaks their JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bench.failures import BenchError
from bench.machine import memory_mib
from bench.records import Case, Record, check
from bench.reference import READY
from bench.serving import PROJECT

_LOAD_LIMIT_S = 1800.0


def run_load(address: str, clients: int, cases: Sequence[Case]) -> tuple[list[Record], float]:
    """Send the cases from a process of its own; the records and the seconds that all took."""
    plan = {"address": f"grpc://{address}", "clients": clients, "cases": [case.as_json() for case in cases]}
    content = run_json("bench.load", [], json.dumps(plan))
    records = [Record.parse(values) for values in content["records"]]
    return [check(record, case) for record, case in zip(records, cases, strict=True)], content["wall_s"]


def run_json(module: str, arguments: Sequence[str], text: str = "") -> Any:
    """Run a module of ours to its end and read the JSON that it prints."""
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(
        command, input=text, cwd=PROJECT, capture_output=True, text=True, timeout=_LOAD_LIMIT_S, check=False
    )
    if done.returncode:
        raise BenchError(f"{module} ended with status {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout)


class ReferenceProcess:
    """transformers in a process of its own that keeps its model loaded. A context manager."""

    def __init__(self, checkpoint: Path, dtype: str) -> None:
        command = [sys.executable, "-m", "bench.reference", str(checkpoint.absolute()), dtype]
        self._process = subprocess.Popen(
            command, cwd=PROJECT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def __enter__(self) -> Self:
        self._read(READY)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()

    def measure(self, case: Case) -> Record:
        """One case, from the picture's bytes to the last token."""
        if self._process.stdin is None:
            raise BenchError("the reference process takes no input")
        self._process.stdin.write(json.dumps(case.as_json()) + "\n")
        self._process.stdin.flush()
        return check(Record.parse(json.loads(self._read())), case)

    def memory_mib(self) -> dict[str, float]:
        return memory_mib([self._process.pid])

    def _read(self, wanted: str | None = None) -> str:
        line = self._process.stdout.readline() if self._process.stdout is not None else ""
        if not line or (wanted is not None and line.strip() != wanted):
            raise BenchError(f"the reference process ended with status {self._process.wait()}")
        return line
