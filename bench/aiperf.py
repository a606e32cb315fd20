"""One AIPerf run against generate_stream, and the figures out of its export."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.failures import BenchError
from bench.perf_inputs import MAX_TOKENS
from bench.serving import Addresses
from bench.tools import Tool

_RUN_LIMIT_S = 1800.0
_EXPORT = "profile_export_aiperf.json"
_IMAGE_SIDE_PX = 256
_PROMPT_TOKENS = 20
COLUMNS = (
    "clients",
    "requests",
    "requests/s",
    "TTFT p50 ms",
    "TTFT p95 ms",
    "ITL p50 ms",
    "p50 ms",
    "p99 ms",
    "tokens/s",
)


@dataclass(frozen=True)
class AIPerfRun:
    """`checkpoint` holds the tokenizer that AIPerf counts with; `template` is the request's JSON."""

    concurrency: int
    requests: int
    checkpoint: Path
    template: Path


@dataclass(frozen=True)
class AIPerfResult:
    """TTFT: time to first token; ITL: inter-token latency; the rest is of whole requests."""

    concurrency: int
    requests: int
    requests_per_s: float
    ttft_p50_ms: float
    ttft_p95_ms: float
    itl_p50_ms: float
    p50_ms: float
    p99_ms: float
    tokens_per_s: float

    def row(self) -> list[object]:
        return list(asdict(self).values())


def measure(tool: Tool, addresses: Addresses, run: AIPerfRun, folder: Path) -> AIPerfResult:
    """Run it to its end. Raises BenchError when the tool fails or any request does."""
    folder.mkdir(parents=True, exist_ok=True)
    output = tool.run(arguments(addresses, run, folder), folder, _RUN_LIMIT_S)
    exports = list(folder.rglob(_EXPORT))
    if not exports:
        raise BenchError(f"aiperf wrote no result:\n{output[-2000:]}")
    return parse_export(json.loads(exports[0].read_text()), run)


def arguments(addresses: Addresses, run: AIPerfRun, folder: Path) -> list[str]:
    """The command line: the template endpoint against the orchestrator's generate_stream."""
    return [
        *("profile", "--model", "orchestrator", "--url", addresses.http, "--endpoint-type", "template"),
        *("--custom-endpoint", "/v2/models/orchestrator/generate_stream", "--streaming"),
        *("--extra-inputs", f"payload_template:{run.template}", "--extra-inputs", "response_field:text_output"),
        *("--tokenizer", str(run.checkpoint.absolute())),
        *("--image-width-mean", str(_IMAGE_SIDE_PX), "--image-height-mean", str(_IMAGE_SIDE_PX)),
        *("--synthetic-input-tokens-mean", str(_PROMPT_TOKENS), "--output-tokens-mean", str(MAX_TOKENS)),
        *("--request-count", str(run.requests), "--concurrency", str(run.concurrency)),
        *("--output-artifact-dir", str(folder), "--ui", "none"),
    ]


def parse_export(content: Any, run: AIPerfRun) -> AIPerfResult:
    """Raises BenchError when a request failed or is missing."""
    ended = int(content["request_count"]["avg"])
    failed = int((content.get("error_request_count") or {}).get("avg") or 0)
    if failed or ended < run.requests or content.get("error_summary") or content.get("was_cancelled"):
        raise BenchError(
            f"{ended} of {run.requests} requests ended well, {failed} failed: {content.get('error_summary')}"
        )
    return AIPerfResult(
        concurrency=run.concurrency,
        requests=ended,
        requests_per_s=content["request_throughput"]["avg"],
        ttft_p50_ms=content["time_to_first_token"]["p50"],
        ttft_p95_ms=content["time_to_first_token"]["p95"],
        itl_p50_ms=content["inter_token_latency"]["p50"],
        p50_ms=content["request_latency"]["p50"],
        p99_ms=content["request_latency"]["p99"],
        tokens_per_s=content["output_token_throughput"]["avg"],
    )
