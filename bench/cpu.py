"""The server beside transformers' `generate` on this machine's CPU: `python -m bench.cpu`.

Two checkpoints: the demo's, and one of 0.4 B random parameters. Writes figures as JSON and as a table.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.checkpoint import ensure_checkpoint
from bench.comparison import Plan, compare
from bench.failures import BenchError
from bench.figures import markdown_table
from bench.machine import command_line, describe
from bench.options import add_output, counts, names, variable
from bench.serving import CACHE, DEMO_CHECKPOINT, say
from deepstack_serving.errors import DeepstackError

_ARMS = ("demo", "random")
_DTYPES = ("float32", "bfloat16")


def main() -> int:
    """Exit code 1 with one line on standard error when anything fails."""
    arguments = _parse()
    plan = Plan(arguments.samples, arguments.clients, arguments.rounds, arguments.tokens, dict(arguments.variable))
    about = describe(command_line("bench.cpu"))
    try:
        results = [_run_arm(arm, dtype, arguments, plan) for arm in arguments.checkpoints for dtype in arguments.dtypes]
    except (BenchError, DeepstackError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    _write(arguments.output, about, results)
    return 0


def _run_arm(arm: str, dtype: str, arguments: argparse.Namespace, plan: Plan) -> dict[str, Any]:
    checkpoint = arguments.demo_checkpoint if arm == "demo" else ensure_checkpoint(arguments.cache / "qwen3_vl_random")
    with tempfile.TemporaryDirectory(prefix="deepstack-bench-") as folder:
        return compare(arm, checkpoint, dtype, plan, Path(folder))


def tables(results: Sequence[Mapping[str, Any]]) -> str:
    """One table per arm."""
    return "\n\n".join(
        f"### {result['checkpoint']} checkpoint, {result['dtype']}\n\n{_table(result)}" for result in results
    )


def _table(result: Mapping[str, Any]) -> str:
    server, generate, step = result["server"], result["generate"], result["decode_step_us"]
    ours, theirs = result["memory_mib"]["server"], result["memory_mib"]["generate"]
    rows: list[list[object]] = [
        _row("time to first token, ms", server, generate, "first_token_ms", result["first_token_over_generate"]),
        _row("time per token, 1 client, ms", server, generate, "per_token_ms", result["per_token_over_generate"]),
        *(_throughput_row(level) for level in result["clients"]),
        _row("peak memory, MiB, sum of processes", ours, theirs, "peak_rss"),
        _row("memory at the end, MiB, shared pages once", ours, theirs, "pss"),
        ["one decode step at the client, us", step["client"], None, None],
        ["... outside Triton's compute of the two stages, us", step["outside_triton_compute"], None, None],
        ["... outside the two stages' own run, us", step["outside_stages"], None, None],
    ]
    return markdown_table(("", "server", "generate", "ratio"), rows)


def _throughput_row(level: Mapping[str, Any]) -> list[object]:
    numbers = [level[key] for key in ("tokens_per_s", "generate_tokens_per_s", "over_generate")]
    return [f"tokens/s, {level['clients']} clients", *numbers]


def _row(
    label: str, ours: Mapping[str, Any], theirs: Mapping[str, Any], key: str, ratio: float | None = None
) -> list[object]:
    return [label, ours[key], theirs[key], ours[key] / theirs[key] if ratio is None else ratio]


def _write(folder: Path, about: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> None:
    text = tables(results)
    print(text)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{about['date'][:10]}-cpu"
    path.with_suffix(".json").write_text(json.dumps({**about, "results": results}, indent=2) + "\n")
    head = (
        f"# CPU benchmark of {about['date']}\n\n`{about['command']}`\n\n"
        f"{about['cores']} cores of {about['processor']}, {about['memory_gib']} GiB of memory, "
        f"load average before the run {about['load_average']}.\n\n"
    )
    path.with_suffix(".md").write_text(f"{head}{text}\n")
    say(f"written to {path}.json and .md")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoints", type=names(_ARMS), default=_ARMS, metavar="demo,random")
    parser.add_argument("--dtypes", type=names(_DTYPES), default=_DTYPES, metavar="float32,bfloat16")
    parser.add_argument("--demo-checkpoint", type=Path, default=DEMO_CHECKPOINT, metavar="DIR")
    parser.add_argument("--samples", type=int, default=5, metavar="N", help="requests that medians are taken of")
    parser.add_argument("--clients", type=counts, default=(1, 4, 8, 16), metavar="N,N,...")
    parser.add_argument("--rounds", type=int, default=2, metavar="N", help="requests of each client")
    parser.add_argument("--tokens", type=int, default=128, metavar="N", help="tokens of each answer")
    parser.add_argument("--variable", type=variable, action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--cache", type=Path, default=CACHE, metavar="DIR", help="where the random checkpoint is kept")
    add_output(parser)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
