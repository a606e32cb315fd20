"""Many clients in several processes that begin together, so that the clients themselves do not set the pace."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import IO, Any

from bench.failures import BenchError
from bench.figures import MILLISECONDS, median, percentile
from bench.load import READY
from bench.records import Case, Record, check
from bench.serving import PROJECT

CLIENTS_PER_PROCESS = 16


def run_crowd(address: str, clients: int, cases: Sequence[Case], stream: bool) -> dict[str, Any]:
    """All cases, at most `clients` at once; figures over all of them. Raises BenchError when a request fails."""
    shares = split(clients, cases)
    processes = [_start() for _ in shares]
    try:
        for process, (count, share) in zip(processes, shares, strict=True):
            plan = {"address": f"grpc://{address}", "clients": count, "stream": stream, "waits": True}
            _send(process, json.dumps({**plan, "cases": [case.as_json() for case in share]}))
        for process in processes:
            if _pipe(process.stdout).readline().strip() != READY:
                raise BenchError("a load process ended before it could begin")
        for process in processes:
            _send(process, "")
        contents = [_finish(process) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    records = [
        check(Record.parse(values), case)
        for content, (_, share) in zip(contents, shares, strict=True)
        for values, case in zip(content["records"], share, strict=True)
    ]
    ended_s = max(content["started_s"] + content["wall_s"] for content in contents)
    return figures(records, ended_s - min(content["started_s"] for content in contents), clients)


def split(clients: int, cases: Sequence[Case]) -> list[tuple[int, list[Case]]]:
    """Clients and cases of each process; cases go round, so that shares differ by one at most."""
    processes = min(-(-clients // CLIENTS_PER_PROCESS), len(cases))
    counts = [len(range(index, clients, processes)) for index in range(processes)]
    return [(count, list(cases[index::processes])) for index, count in enumerate(counts)]


def figures(records: Sequence[Record], wall_s: float, clients: int) -> dict[str, Any]:
    """Throughput of all, and latencies over the requests."""
    first, whole = ([getattr(record, name) * MILLISECONDS for record in records] for name in ("first_s", "end_s"))
    streamed = [record for record in records if record.tokens > record.first_tokens]
    per_token = [record.per_token_s * MILLISECONDS for record in streamed]
    return {
        "clients": clients,
        "requests": len(records),
        "wall_s": wall_s,
        "tokens_per_s": sum(record.tokens for record in records) / wall_s,
        "requests_per_s": len(records) / wall_s,
        "first_token_ms": {"p50": median(first), "p95": percentile(first, 95)} if streamed else None,
        "per_token_ms": {"p50": median(per_token), "p95": percentile(per_token, 95)} if streamed else None,
        "whole_ms": {"p50": median(whole), "p95": percentile(whole, 95)},
        "input_tokens": sorted({record.input_tokens for record in records}),
    }


def _start() -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "bench.load"]
    return subprocess.Popen(command, cwd=PROJECT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _send(process: subprocess.Popen[str], line: str) -> None:
    pipe = _pipe(process.stdin)
    pipe.write(f"{line}\n")
    pipe.flush()


def _finish(process: subprocess.Popen[str]) -> Any:
    text = _pipe(process.stdout).read()
    if process.wait():
        raise BenchError(f"a load process ended with status {process.returncode}")
    return json.loads(text)


def _pipe(pipe: IO[str] | None) -> IO[str]:
    if pipe is None:
        raise BenchError("a load process has no pipe")
    return pipe
