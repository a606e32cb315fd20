"""The clients: a process of its own that sends requests over gRPC, some at once, and measures them.

`python -m bench.load` reads a plan from standard input and writes the records to standard output, both JSON.
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

    A single client streams, to see its first token; several ask for whole answers, as `generate` gives them.
    """
    ask = measure if plan["clients"] == 1 else measure_whole
    cases = [Case(**values) for values in plan["cases"]]
    with Client(plan["address"]) as client, ThreadPoolExecutor(plan["clients"]) as pool:
        started_s = time.perf_counter()
        records: Sequence[Record] = list(pool.map(lambda case: ask(client, case), cases))
        return {"wall_s": time.perf_counter() - started_s, "records": [asdict(record) for record in records]}


if __name__ == "__main__":
    json.dump(run_plan(json.load(sys.stdin)), sys.stdout)
