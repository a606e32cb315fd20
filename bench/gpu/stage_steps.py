"""One language stage's steps without a server: `python -m bench.gpu.stage_steps SHAPE FOLDER`, on a GPU.

For every way of compiling: seconds of loading and capturing, memory, and per step the time of a whole call beside that
of the graph's replay alone; what lies between the two is the stage's own Python and copies.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.gpu.checkpoint import ensure_checkpoint
from bench.gpu.shapes import SHAPES, shape
from deepstack_serving.checkpoint import open_checkpoint
from deepstack_serving.injection import plan_stages
from deepstack_serving.settings import parse_settings
from deepstack_serving.stages.language import LanguageStage

CONTEXT = 1100
ROOM = 40  # tokens that a burst may add
ROUNDS = 30


def main() -> None:
    """Prints one JSON line for every way of compiling."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--compile", default="off,layers,autotune")
    parser.add_argument("--batches", default="1,16,64")
    parser.add_argument("--prefills", default="128,1088,4096")
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--setting", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--kernels", action="store_true", help="list the kernels that take the most time")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    ensure_checkpoint(shape(arguments.shape), arguments.folder, None, "cuda")
    results = []
    for mode in arguments.compile.split(","):
        results.append(measure(mode, arguments))
        print(json.dumps(results[-1]), flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    if arguments.output:
        arguments.output.write_text(json.dumps(results, indent=1))


def measure(mode: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The last of the stages, which samples."""
    given = dict(item.split("=", 1) for item in arguments.setting)
    values = {"checkpoint": str(arguments.folder), "compile": mode, "kv_pool_tokens": str(80 * 2048), **given}
    settings = parse_settings(values)
    checkpoint = open_checkpoint(settings.checkpoint)
    names = tuple(f"language_{index}" for index in range(arguments.stages))
    plans = plan_stages(checkpoint.layer_count, len(names), None, checkpoint.deepstack_layers)
    started = time.perf_counter()
    stage = LanguageStage(settings, checkpoint, plans, names, len(names) - 1)
    result: dict[str, Any] = {"compile": mode, "start_s": round(time.perf_counter() - started, 1)}
    result["graphs"] = stage.runner.captured
    result["reserved_gib"] = round(torch.cuda.memory_reserved() / 2**30, 2)
    pool = 2 * stage._pool.keys.nbytes
    weights = sum(weight.nbytes for weight in stage._model.parameters())
    result["beyond_weights_and_pool_gib"] = round((torch.cuda.memory_reserved() - pool - weights) / 2**30, 2)
    for batch in map(int, arguments.batches.split(",")):
        result[f"decode_{batch}"] = times(stage, decode_call(stage, batch))
        if arguments.kernels:
            result[f"decode_{batch}"]["kernels"] = kernels(stage, decode_call(stage, batch))
    for rows in map(int, arguments.prefills.split(",")):
        call = _prefill_call(stage, rows)
        result[f"prefill_{rows}"] = times(stage, call)
        result[f"prefill_{rows}_eager"] = times(stage, {**call, "eager": torch.tensor([True])})
        if arguments.kernels:
            result[f"prefill_{rows}"]["kernels"] = kernels(stage, call)
    return result


def times(stage: LanguageStage, call: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Milliseconds: a whole call with its results on the host, and the GPU's own time in it."""

    def whole() -> None:
        for tensor in stage.run(call, ("next_ids", "logprobs")).values():
            tensor.cpu()

    whole()
    return {"call_ms": _median_ms(whole), "gpu_ms": _gpu_ms(lambda: stage.run(call, ("next_ids", "logprobs")))}


def kernels(stage: LanguageStage, call: dict[str, torch.Tensor]) -> list[tuple[str, int, float]]:
    """(name, launches, milliseconds) of one call, the longest first."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as record:
        stage.run(call, ("next_ids", "logprobs"))
        torch.cuda.synchronize()
    rows = [(item.key[:70], item.count, round(item.device_time_total / 1e3, 3)) for item in record.key_averages()]
    return sorted(rows, key=lambda row: -row[2])[:16]


def _median_ms(function: Callable[[], None]) -> float:
    seconds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - started)
    return round(statistics.median(seconds) * 1e3, 3)


def _gpu_ms(function: Callable[[], object]) -> float:
    """Back to back: the queue never runs dry where the GPU is what takes the time."""
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(ROUNDS):
        function()
    end.record()
    torch.cuda.synchronize()
    return round(float(start.elapsed_time(end)) / ROUNDS, 3)


def decode_call(stage: LanguageStage, batch: int, context: int = CONTEXT) -> dict[str, torch.Tensor]:
    """A step of so many sequences, whose blocks are anywhere in the pool and have room for some more tokens."""
    blocks = -(-(context + ROOM) // stage._pool.block_size)
    tables = torch.randperm(stage._pool.blocks)[: batch * blocks].reshape(batch, blocks).int()
    return _entering(stage, batch) | {
        "position_ids": torch.full((stage.contract.position_axes, batch), context),
        "query_lengths": torch.ones(batch, dtype=torch.int32),
        "context_lengths": torch.full((batch,), context + 1, dtype=torch.int32),
        "block_tables": tables,
        "sample_rows": torch.arange(batch),
    }


def _prefill_call(stage: LanguageStage, rows: int) -> dict[str, torch.Tensor]:
    blocks = -(-rows // stage._pool.block_size)
    return _entering(stage, rows) | {
        "position_ids": torch.arange(rows).expand(stage.contract.position_axes, rows),
        "query_lengths": torch.tensor([rows], dtype=torch.int32),
        "context_lengths": torch.tensor([rows], dtype=torch.int32),
        "block_tables": torch.arange(blocks, dtype=torch.int32)[None],
        "sample_rows": torch.tensor([rows - 1]),
    }


def _entering(stage: LanguageStage, rows: int) -> dict[str, torch.Tensor]:
    if stage.plan.is_first:
        return {"input_ids": torch.randint(1000, 2000, (rows,))}
    return {"hidden_states": torch.randn(rows, stage.contract.hidden_size, dtype=torch.bfloat16)}


if __name__ == "__main__":
    main()
