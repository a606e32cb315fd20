"""Load-tests a server with the usual tools: `python -m bench.perf [--tool perf_analyzer|aiperf]`.

Every request carries a picture of its own. The run fails when a single request does.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench import aiperf, perf_analyzer, tools
from bench.failures import BenchError
from bench.figures import markdown_table
from bench.machine import command_line, describe
from bench.options import add_output, counts, variable
from bench.perf_inputs import (
    MAX_TOKENS,
    encoder_requests,
    orchestrator_requests,
    write_requests,
    write_template,
)
from bench.serving import CACHE, DEMO_CHECKPOINT, Addresses, addresses_of, embedded_server, say
from deepstack_serving.errors import DeepstackError

TOOLS = ("perf_analyzer", "aiperf")


def main() -> int:
    """Exit code 1 with one line on standard error when anything fails."""
    arguments = _parse()
    try:
        columns, rows, results = _run(arguments)
    except (BenchError, DeepstackError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    table = markdown_table(columns, rows)
    print(table)
    _write(arguments.output, arguments.tool, table, results)
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tool", choices=TOOLS, default=TOOLS[0])
    parser.add_argument("--checkpoint", type=Path, default=DEMO_CHECKPOINT, metavar="DIR")
    parser.add_argument("--address", metavar="HOST:PORT", help="gRPC address of a running server, in place of an own")
    parser.add_argument("--http-address", metavar="HOST:PORT", help="HTTP address of that server")
    parser.add_argument("--concurrency", type=counts, default=(1, 4, 16), metavar="N,N,...")
    parser.add_argument("--requests", type=int, default=48, metavar="N", help="per level, at least 3 per client")
    parser.add_argument("--variable", type=variable, action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--cache", type=Path, default=CACHE, metavar="DIR", help="where the tools are kept")
    add_output(parser)
    arguments = parser.parse_args()
    if bool(arguments.address) != bool(arguments.http_address):
        parser.error("--address and --http-address name the same server: give both")
    if not (arguments.checkpoint / "config.json").is_file():
        parser.error(f"no checkpoint at {arguments.checkpoint}")
    return arguments


def _run(arguments: argparse.Namespace) -> tuple[Sequence[str], list[list[object]], list[dict[str, Any]]]:
    make = _run_aiperf if arguments.tool == "aiperf" else _run_perf_analyzer
    tool = tools.aiperf(arguments.cache) if arguments.tool == "aiperf" else tools.perf_analyzer(arguments.cache)
    with _server(arguments) as addresses, tempfile.TemporaryDirectory(prefix="deepstack-perf-") as folder:
        return make(tool, addresses, arguments, Path(folder))


@contextmanager
def _server(arguments: argparse.Namespace) -> Iterator[Addresses]:
    if arguments.address:
        yield Addresses(arguments.address, arguments.http_address)
        return
    with embedded_server(arguments.checkpoint, dict(arguments.variable)) as server:
        yield addresses_of(server)


def _run_perf_analyzer(
    tool: tools.Tool, addresses: Addresses, arguments: argparse.Namespace, folder: Path
) -> tuple[Sequence[str], list[list[object]], list[dict[str, Any]]]:
    results = []
    for run in _perf_analyzer_runs(arguments, folder):
        say(f"perf_analyzer: {run.model}, {run.concurrency} at once, {run.requests} requests ...")
        results.append(perf_analyzer.measure(tool, addresses, run, folder))
    return perf_analyzer.COLUMNS, [result.row() for result in results], [asdict(result) for result in results]


def _perf_analyzer_runs(arguments: argparse.Namespace, folder: Path) -> Iterator[perf_analyzer.PerfRun]:
    first_seed = 0
    for model, make, tokens in (
        ("orchestrator", orchestrator_requests, MAX_TOKENS),
        ("vision_encoder", encoder_requests, 0),
    ):
        for concurrency in arguments.concurrency:
            count = max(arguments.requests, 3 * concurrency)
            path = write_requests(folder / f"{model}-{concurrency}-input.json", make(count, first_seed))
            yield perf_analyzer.PerfRun(model, concurrency, count, path, tokens)
            first_seed += count


def _run_aiperf(
    tool: tools.Tool, addresses: Addresses, arguments: argparse.Namespace, folder: Path
) -> tuple[Sequence[str], list[list[object]], list[dict[str, Any]]]:
    template = write_template(folder / "template.jinja")
    results = []
    for concurrency in arguments.concurrency:
        run = aiperf.AIPerfRun(concurrency, max(arguments.requests, 3 * concurrency), arguments.checkpoint, template)
        say(f"aiperf: generate_stream, {concurrency} at once, {run.requests} requests ...")
        results.append(aiperf.measure(tool, addresses, run, folder / f"aiperf-{concurrency}"))
    return aiperf.COLUMNS, [result.row() for result in results], [asdict(result) for result in results]


def _write(folder: Path, tool: str, table: str, results: list[dict[str, Any]]) -> None:
    about = describe(command_line("bench.perf"))
    path = folder / f"{about['date'][:10]}-{tool}.json"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**about, "results": results, "table": table.splitlines()}, indent=2) + "\n")
    say(f"written to {path}")


if __name__ == "__main__":
    sys.exit(main())
