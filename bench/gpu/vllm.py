"""vLLM on the same workload: its benchmark runs from an unpacked folder of its own, and its lines are read here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from bench.failures import BenchError
from bench.serving import PROJECT

SCRIPT = "vllm_bench.py"
_RUNNER = PROJECT / "bench" / "gpu" / "vllm.sh"
_ALONE = re.compile(r"^1 client, (?P<kind>image|text): TTFT (?P<first>[\d.]+) ms, TPOT (?P<per_token>[\d.]+) ms")
_MANY = re.compile(
    r"^(?P<clients>\d+) at once, (?P<requests>\d+) requests, image=(?P<image>True|False): "
    r"(?P<tokens_per_s>[\d.]+) tok/s, (?P<requests_per_s>[\d.]+) req/s, (?P<wall_s>[\d.]+) s"
)
_START = re.compile(r"^start s (?P<seconds>[\d.]+)")
_PROMPT = re.compile(r"^prompt tokens (?P<tokens>\d+)")


def command(folder: Path, script: Path | None, checkpoint: Path, side_px: int, tokens: int, clients: int) -> list[str]:
    """What runs it. Raises BenchError where the folder holds no vLLM or the script is not to be found."""
    script = script or folder / SCRIPT
    for path in (folder / "vllm", script):
        if not path.exists():
            raise BenchError(f"{path} is not there; --vllm names the folder that vLLM was unpacked to")
    numbers = (str(number) for number in (side_px, tokens, clients))
    return ["bash", str(_RUNNER), str(folder.absolute()), str(script.absolute()), str(checkpoint.absolute()), *numbers]


def parse_output(text: str) -> list[dict[str, Any]]:
    """Its lines as phases of an arm, named and keyed as those of the server; other lines are left out."""
    found = (_phase(line.strip()) for line in text.splitlines())
    return [phase for phase in found if phase is not None]


def _phase(line: str) -> dict[str, Any] | None:
    if match := _START.match(line):
        return _result("start 1", {"seconds": float(match["seconds"])})
    if match := _PROMPT.match(line):
        return _result("overheads", {"input_tokens": int(match["tokens"])})
    if match := _ALONE.match(line):
        times = {"first_token_ms": float(match["first"]), "per_token_ms": float(match["per_token"])}
        return _result(f"{match['kind']}, 1 client", times)
    if match := _MANY.match(line):
        kind = "image" if match["image"] == "True" else "text"
        counts = {name: int(match[name]) for name in ("clients", "requests")}
        rates = {name: float(match[name]) for name in ("tokens_per_s", "requests_per_s", "wall_s")}
        return _result(f"{kind}, {match['clients']} at once", {**counts, **rates})
    return None


def _result(phase: str, result: dict[str, Any]) -> dict[str, Any]:
    return {"phase": phase, "seconds": None, "result": result}
