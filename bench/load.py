"""The clients: a process of its own that sends requests over gRPC, some at once, and measures them.

`python -m bench.load` reads a plan from standard input and writes the records to standard output, both JSON and a line.
With `"waits": true` in the plan it says READY once it could begin, and begins at the next line of its input, so that
several such processes begin together.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.records import Case, Record
from deepstack_client import Client

READY = "ready"


def measure_whole(client: Client, case: Case) -> Record:
    """One request whose answer comes in one response."""
    images = [Path(case.picture)] if case.picture else []
    started_s = time.perf_counter()
    answer = client.generate(case.question, images, max_tokens=case.max_tokens, temperature=0, ignore_eos=True)
    end_s = time.perf_counter() - started_s
    return Record(
        end_s, end_s, answer.num_output_tokens, answer.num_output_tokens, answer.num_input_tokens, answer.text
    )


def measure(client: Client, case: Case) -> Record:
    """One streamed request, from the picture's bytes to the end of the answer."""
    images = [Path(case.picture)] if case.picture else []
    started_s = time.perf_counter()
    first_s, first_tokens = 0.0, 0
    with client.stream(case.question, images, max_tokens=case.max_tokens, temperature=0, ignore_eos=True) as stream:
        for chunk in stream:
            if not first_tokens:
                first_s, first_tokens = time.perf_counter() - started_s, chunk.num_output_tokens
        end_s = time.perf_counter() - started_s
        completion = stream.completion()
    return Record(
        first_s, end_s, first_tokens, completion.num_output_tokens, completion.num_input_tokens, completion.text
    )


def run_plan(plan: Any) -> dict[str, Any]:
    """All cases in order, at most `clients` at a time; `wall_s` runs from the first start to the last end.

    Unless the plan says `stream`, a single client streams, to see its first token, and several ask for whole answers,
    as `generate` gives them. `started_s` is on the clock that all processes of a machine share.
    """
    ask = measure if plan.get("stream", plan["clients"] == 1) else measure_whole
    cases = [Case(**values) for values in plan["cases"]]
    with Client(plan["address"]) as client, ThreadPoolExecutor(plan["clients"]) as pool:
        client.is_ready()  # the connection is there before the clock starts
        _wait_for_others(plan)
        started_s = time.perf_counter()
        records: Sequence[Record] = list(pool.map(lambda case: ask(client, case), cases))
        wall_s = time.perf_counter() - started_s
    return {"started_s": started_s, "wall_s": wall_s, "records": [asdict(record) for record in records]}


def _wait_for_others(plan: Any) -> None:
    if plan.get("waits"):
        print(READY, flush=True)
        sys.stdin.readline()


if __name__ == "__main__":
    json.dump(run_plan(json.loads(sys.stdin.readline())), sys.stdout)
