"""One perf_analyzer run, and its figures computed from the time stamps that it exports."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.failures import BenchError
from bench.figures import percentile
from bench.serving import Addresses, statistics_of
from bench.tools import Tool

_NANOSECONDS_PER_MS = 1e6
_NANOSECONDS_PER_S = 1e9
_RUN_LIMIT_S = 1800.0
COLUMNS = ("model", "clients", "requests", "requests/s", "p50 ms", "p95 ms", "p99 ms", "first p50 ms", "tokens/s")


@dataclass(frozen=True)
class PerfResult:
    """Latency is from a request to its last response, `first_p50_ms` to its first; tokens are None without text."""

    model: str
    concurrency: int
    requests: int
    requests_per_s: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    first_p50_ms: float
    tokens_per_s: float | None

    def row(self) -> list[object]:
        return list(asdict(self).values())


@dataclass(frozen=True)
class PerfRun:
    """What to send: `input_path` holds the requests, each of which generates `tokens_per_request` (0: no text)."""

    model: str
    concurrency: int
    requests: int
    input_path: Path
    tokens_per_request: int


def measure(tool: Tool, addresses: Addresses, run: PerfRun, folder: Path) -> PerfResult:
    """Run it to its end. Raises BenchError when the tool fails or any request does."""
    export = folder / f"{run.model}-{run.concurrency}.json"
    export.unlink(missing_ok=True)
    failures_before = statistics_of(addresses.http, run.model).failures
    output = tool.run(arguments(addresses, run, export), folder, _RUN_LIMIT_S)
    if not export.exists():
        raise BenchError(f"perf_analyzer wrote no result:\n{output[-2000:]}")
    failures = statistics_of(addresses.http, run.model).failures - failures_before
    if failures:
        raise BenchError(f"{failures} requests to {run.model} failed:\n{output[-2000:]}")
    # The export repeats every response, raw tensor bytes among them: only the time stamps are read.
    return parse_export(json.loads(export.read_text(errors="replace"), strict=False), run)


def arguments(addresses: Addresses, run: PerfRun, export: Path) -> list[str]:
    """The command line; a model that streams needs the streaming call."""
    streaming = ["--streaming"] if run.tokens_per_request else []
    return [
        *("-m", run.model, "-u", addresses.grpc, "-i", "grpc", "--async", *streaming),
        *("--input-data", str(run.input_path)),
        *("--request-count", str(run.requests)),
        *("--concurrency-range", str(run.concurrency)),
        *("--profile-export-file", str(export)),
    ]


def parse_export(content: Any, run: PerfRun) -> PerfResult:
    """Raises BenchError when a request has no response, or requests are missing."""
    requests = [request for experiment in content["experiments"] for request in experiment["requests"]]
    unanswered = sum(not request["response_timestamps"] for request in requests)
    if unanswered or len(requests) < run.requests:
        raise BenchError(f"{run.model}: {len(requests)} of {run.requests} requests ended, {unanswered} unanswered")
    last = [_elapsed_ms(request, -1) for request in requests]
    first = [_elapsed_ms(request, 0) for request in requests]
    started = min(request["timestamp"] for request in requests)
    ended = max(request["response_timestamps"][-1] for request in requests)
    per_s = len(requests) / ((ended - started) / _NANOSECONDS_PER_S)
    return PerfResult(
        model=run.model,
        concurrency=run.concurrency,
        requests=len(requests),
        requests_per_s=per_s,
        p50_ms=percentile(last, 50),
        p95_ms=percentile(last, 95),
        p99_ms=percentile(last, 99),
        first_p50_ms=percentile(first, 50),
        tokens_per_s=per_s * run.tokens_per_request or None,
    )


def _elapsed_ms(request: Any, response: int) -> float:
    elapsed: float = (request["response_timestamps"][response] - request["timestamp"]) / _NANOSECONDS_PER_MS
    return elapsed
