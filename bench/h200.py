"""The server on a GPU beside transformers and vLLM on the same requests: `python -m bench.h200 --shape 8b`.

Random-weight checkpoints of real shapes; requests of one 1024x1024 JPEG picture and 64 text tokens, or of 128 text
tokens, 128 tokens out, greedy, caches off. Each arm is a process of its own; results go to a JSON file after every arm,
then to a Markdown table and a chart. `--merge` joins files of several calls.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from bench.failures import BenchError
from bench.gpu.benchmark import ARMS, Benchmark
from bench.gpu.chart import draw
from bench.gpu.generate import MODES
from bench.gpu.results import by_shape, read_runs
from bench.gpu.shapes import SHAPES
from bench.gpu.table import report
from bench.options import add_output, counts, names, variable
from bench.serving import say
from deepstack_serving.errors import DeepstackError


def main() -> int:
    """Exit code 1 with one line on standard error when nothing could be measured; failed phases are in the results."""
    arguments = _parse()
    try:
        runs = read_runs(arguments.merge)
        if arguments.arms:
            benchmark = Benchmark(arguments)
            runs.append(benchmark.run)
            benchmark.measure(lambda: _save(arguments, runs))
        _save(arguments, runs)
    except (BenchError, DeepstackError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    _present(arguments, runs)
    return 0


def _stem(arguments: argparse.Namespace, runs: list[dict[str, Any]]) -> Path:
    return Path(arguments.output) / f"{runs[-1]['date'][:10]}-{arguments.name}"


def _save(arguments: argparse.Namespace, runs: list[dict[str, Any]]) -> None:
    """The raw results so far: what ends this process loses nothing that was measured."""
    path = _stem(arguments, runs).with_suffix(".json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"runs": runs}, indent=1) + "\n")


def _present(arguments: argparse.Namespace, runs: list[dict[str, Any]]) -> None:
    stem, text = _stem(arguments, runs), report(runs)
    print(text)
    stem.with_suffix(".md").write_text(f"{text}\n")
    for name, results in by_shape(runs).items():
        try:
            draw(name, results, stem.parent, f"{stem.name}-{name}")
        except ImportError as error:
            say(f"no chart: {error}; the extra 'bench' brings matplotlib")
    say(f"written to {stem}.json and .md")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--arms", type=names(ARMS), metavar=",".join(ARMS), help="default: all; with --merge: none")
    parser.add_argument("--merge", type=Path, nargs="+", default=[], metavar="FILE", help="results of earlier calls")
    parser.add_argument("--limit-s", type=float, default=570.0, metavar="S", help="for all arms together (%(default)g)")
    parser.add_argument("--name", default="h200", help="of the files that are written (%(default)s)")
    parser.add_argument("--checkpoints", type=Path, metavar="DIR", help="where random checkpoints are kept")
    parser.add_argument(
        "--tokenizer", type=Path, metavar="DIR", help="holds the real tokenizer.json, or .json.xz of it"
    )
    _add_server_arguments(parser)
    parser.add_argument("--samples", type=int, default=5, metavar="N", help="requests that medians are taken of")
    parser.add_argument("--clients", type=counts, default=(2, 4, 8, 16, 32, 64), metavar="N,N,...", help="beside one")
    parser.add_argument("--rounds", type=int, default=2, metavar="N", help="requests of each client")
    parser.add_argument("--tokens", type=int, default=128, metavar="N", help="tokens of each answer")
    parser.add_argument("--streams-only", action="store_true", help="leave the phase of whole answers out")
    parser.add_argument("--profile", action="store_true", help="also: Triton's times per model, step and first token")
    parser.add_argument("--modes", type=names(MODES), default=MODES, metavar=",".join(MODES), help="of generate")
    parser.add_argument("--vllm", type=Path, metavar="DIR", help="what vLLM was unpacked to, with vllm_bench.py in it")
    parser.add_argument("--vllm-script", type=Path, metavar="FILE", help="where vllm_bench.py is, if not there")
    add_output(parser)
    arguments = parser.parse_args()
    if arguments.arms is None:
        arguments.arms = () if arguments.merge else ARMS
    return arguments


def _add_server_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--triton", type=Path, metavar="DIR", help="the server's unpacked parts; default: the wheel's")
    parser.add_argument("--stages", type=counts, default=(2,), metavar="1,2", help="language stages, a server for each")
    parser.add_argument("--pipelines", type=int, default=1, metavar="N", help="of encoder and language stages")
    parser.add_argument("--devices", metavar="MODEL=cuda:N,...", help="as the setting 'devices'")
    parser.add_argument("--setting", type=variable, action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--server-argument", action="append", default=[], metavar="ARGUMENT", help="of tritonserver")
    parser.add_argument("--starts", type=int, default=1, metavar="N", help="2 measures a start with compiled code, too")


if __name__ == "__main__":
    sys.exit(main())
