"""Times candidates of paged attention on a GPU, each as one CUDA graph of 36 layers, and writes attention.json.

`--sweep` times this project's kernels with other tiles and splits instead, to choose the figures of paged_launch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from bench.attention_arms import ARMS, Attend
from bench.attention_sweep import sweep_arms
from bench.attention_work import LAYERS, WORK, Inputs, Work, make_inputs
from bench.machine import command_line, describe
from deepstack_serving.errors import DeepstackError

try:
    from triton.errors import TritonError
except ImportError:  # then no kernel of Triton's can fail either

    class TritonError(Exception):  # type: ignore[no-redef]
        """Stands in."""


_LIMIT_S = 40.0  # what would start later is left out, and says so
_SWEEP_LIMIT_S = 240.0
_REPLAYS = 7
# Compilers and kernels of others fail in all these ways; a failure is a row of the result.
_FAILURES = (
    *(RuntimeError, AssertionError, ImportError, TypeError, ValueError, AttributeError, LookupError),
    *(TritonError, DeepstackError),
)
Row = dict[str, Any]
Arm = tuple[str, Callable[[Inputs], Attend]]


def copy_bandwidth() -> float:
    """Bytes read and written per second by a large copy."""
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_seconds(lambda: target.copy_(source))


def median_seconds(call: Callable[[], object]) -> float:
    call()
    times = []
    for _ in range(_REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return float(statistics.median(times))


def graph_of(attend: Attend, inputs: Inputs) -> torch.cuda.CUDAGraph:
    """All layers in one graph, warm."""
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for layer in inputs.layers[:2]:
            attend(layer)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in inputs.layers:
            attend(layer)
    return graph


def measure(make: Callable[[Inputs], Attend], inputs: Inputs, right: torch.Tensor | None, bandwidth: float) -> Row:
    """Microseconds a layer, and how far the first layer's output is from `right` (by norm); or why there is no time."""
    try:
        attend = make(inputs)
        output = attend(inputs.layers[0]).float()
        us = median_seconds(graph_of(attend, inputs).replay) / LAYERS * 1e6
    except _FAILURES as error:
        return failure(error)
    row: Row = {
        "us_per_layer": us,
        "share_of_copy_bandwidth": inputs.work.kv_bytes / us * 1e6 / bandwidth,
        "tflops": inputs.work.operations / us / 1e6,
    }
    if right is not None:
        row["difference"] = float((output - right).norm() / right.norm())
    return row


def failure(error: BaseException) -> Row:
    return {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:300]}


def first_output(inputs: Inputs) -> torch.Tensor | None:
    """What this project's operator gives in the first layer, to compare the others with."""
    try:
        return ARMS["paged"](inputs)(inputs.layers[0]).float()
    except _FAILURES:
        return None


def run(
    work: Iterable[Work], arms_of: Callable[[Inputs], Iterable[Arm]], bandwidth: float, ends_at: float
) -> Iterator[Row]:
    """One row per step and candidate; a candidate that would begin after `ends_at` (time.monotonic) has no time."""
    for step in work:
        try:
            inputs = make_inputs(step)
        except _FAILURES as error:
            yield {"work": step.name, "arm": "all", **failure(error)}
            continue
        right = first_output(inputs)
        for name, make in arms_of(inputs):
            in_time = time.monotonic() < ends_at
            row = measure(make, inputs, right, bandwidth) if in_time else {"failed": "not begun: out of time"}
            print(line(whole := {"work": step.name, "arm": name, **row}), flush=True)
            yield whole
        del inputs, right
        torch.compiler.reset()
        torch.cuda.empty_cache()


def line(row: Row) -> str:
    head = f"{row['work']:28} {row['arm']:32}"
    if "failed" in row:
        return f"{head} {row['failed']}"
    figures = (
        f"{row['us_per_layer']:9.1f} us {row['share_of_copy_bandwidth']:7.1%} of copy {row['tflops']:7.1f} TFLOP/s"
    )
    return f"{head} {figures}   difference {row.get('difference', float('nan')):.1e}"


def figures(sweep: bool) -> Row:
    bandwidth = copy_bandwidth()
    print(f"copy: {bandwidth / 1e12:.2f} TB/s read and written", flush=True)
    ends_at = time.monotonic() + (_SWEEP_LIMIT_S if sweep else _LIMIT_S)
    if sweep:
        rows = [*run(WORK, sweep_arms, bandwidth, ends_at)]
    else:
        compiling = {"flex, physical pages"}  # last: the rest shall not wait for it
        quick, slow = ([(name, ARMS[name]) for name in ARMS if (name in compiling) is late] for late in (False, True))
        rows = [*run(WORK, lambda _: quick, bandwidth, ends_at), *run(WORK, lambda _: slow, bandwidth, ends_at)]
    return {"copy_bytes_per_second": bandwidth, "layers": LAYERS, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--sweep", action="store_true", help="other tiles and splits of this project's kernels")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this measures on a GPU, and PyTorch finds none")
    arguments.output.mkdir(parents=True, exist_ok=True)
    with torch.inference_mode():
        result = describe(command_line("bench.attention_candidates")) | figures(arguments.sweep)
    result["gpu"] = torch.cuda.get_device_name()
    path = arguments.output / ("attention_sweep.json" if arguments.sweep else "attention.json")
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
