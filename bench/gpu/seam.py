"""Where a decode step's time goes between the stages, without a server: `python -m bench.gpu.seam SHAPE FOLDER`.

Every language stage is a process of its own on the GPU, and they run bursts over the same shared memory as in the
server. Per step and stage: waiting for the other, the stage's own Python and launches, the GPU's time, and handing over
(which waits for the GPU). Medians over all steps but each burst's first.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from bench.gpu.checkpoint import ensure_checkpoint
from bench.gpu.shapes import SHAPES, shape
from bench.gpu.stage_steps import decode_call
from deepstack_serving.checkpoint import open_checkpoint
from deepstack_serving.exchange import Exchange, Link, link_sizes
from deepstack_serving.injection import plan_stages
from deepstack_serving.settings import parse_settings
from deepstack_serving.stages.language import LanguageStage

STEPS, BURSTS, WARM_UP = 16, 8, 2
OUTPUTS = ("next_ids", "logprobs")


class Watch:
    """Notes when a stage receives and sends, and the GPU's time of the step between the two."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self._received_s = self._asked_s = 0.0
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        self._receive, self._send = Link.receive, Link.send

    def receive(self, link: Link, target: torch.Tensor) -> bool:
        """In place of Link.receive."""
        self._asked_s = time.perf_counter()
        result = self._receive(link, target)
        self._received_s = time.perf_counter()
        self._events[0].record()
        return result

    def send(self, link: Link, tensor: torch.Tensor) -> None:
        """In place of Link.send."""
        self._events[1].record()
        launched_s = time.perf_counter()
        self._send(link, tensor)
        sent_s = time.perf_counter()
        if self._received_s:
            self._events[1].synchronize()
            times = {
                "wait_ms": self._received_s - self._asked_s,
                "python_and_launches_ms": launched_s - self._received_s,
                "hand_over_ms": sent_s - launched_s,
            }
            gpu_ms = self._events[0].elapsed_time(self._events[1])
            self.rows.append({**{name: value * 1e3 for name, value in times.items()}, "gpu_ms": float(gpu_ms)})
        self._received_s = 0.0


def stage_process(index: int, settings: dict[str, str], stages: int, context: int, pipe: Connection) -> None:
    """Runs a burst for every (number of sequences, ticket) that comes, and reports its steps when None comes."""
    parsed = parse_settings(settings)
    checkpoint = open_checkpoint(parsed.checkpoint)
    names = tuple(f"language_{number}" for number in range(stages))
    plans = plan_stages(checkpoint.layer_count, stages, None, checkpoint.deepstack_layers)
    stage = LanguageStage(parsed, checkpoint, plans, names, index)
    watch = Watch()

    def receive(link: Link, target: torch.Tensor, timeout_s: float = 0.0) -> bool:
        return watch.receive(link, target)

    def send(link: Link, tensor: torch.Tensor) -> None:
        watch.send(link, tensor)

    for name, function in {"receive": receive, "send": send}.items():
        setattr(Link, name, function)
    wanted = OUTPUTS if stage.plan.is_last else ("hidden_states",)
    calls: dict[int, dict[str, torch.Tensor]] = {}
    pipe.send("ready")
    while (message := pipe.recv()) != "end":
        if message is None:
            pipe.send(watch.rows)
            watch.rows = []
            continue
        batch, ticket, trace = message
        call = calls[batch] if batch in calls else calls.setdefault(batch, _burst_call(stage, batch, context))
        exchange = torch.tensor(list(ticket.encode()), dtype=torch.uint8)
        with _traced(trace and f"{trace}/{stages}-stages-{batch}-at-once-stage-{index}.json.gz"):
            for tensor in stage.run({**call, "exchange": exchange}, wanted).values():
                tensor.cpu()
        pipe.send("done")


@contextmanager
def _traced(file: str) -> Iterator[None]:
    """With a file, what CPU and GPU do meanwhile goes there, for a trace viewer."""
    if not file:
        yield
        return
    with torch.profiler.profile() as record:
        yield
    record.export_chrome_trace(file)


def _burst_call(stage: LanguageStage, batch: int, context: int) -> dict[str, torch.Tensor]:
    call = decode_call(stage, batch, context) | {"decode_steps": torch.tensor([STEPS], dtype=torch.int32)}
    if not stage.plan.is_first:
        call["hidden_states"] = call["hidden_states"][:0]
    if not stage.plan.is_last:
        call.pop("sample_rows")
    return call


class Stages:
    """The processes of a split, ready to run."""

    def __init__(self, settings: dict[str, str], stages: int, most_sequences: int, context: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        contract = open_checkpoint(Path(settings["checkpoint"])).contract
        sizes = link_sizes(stages, most_sequences, most_sequences, contract.hidden_size * 2)
        self._exchange = Exchange.create(sizes)
        self._pipes, self._children = [], []
        for index in range(stages):
            ours, theirs = spawn.Pipe()
            child = spawn.Process(target=stage_process, args=(index, settings, stages, context, theirs), daemon=True)
            child.start()
            self._pipes.append(ours)
            self._children.append(child)
        for pipe in self._pipes:
            pipe.recv()

    def _burst(self, batch: int, trace: str = "") -> float:
        """Milliseconds of a step."""
        started_s = time.perf_counter()
        ticket = self._exchange.begin()
        for pipe in self._pipes:
            pipe.send((batch, ticket, trace))
        for pipe in self._pipes:
            pipe.recv()
        return (time.perf_counter() - started_s) / STEPS * 1e3

    def measure(self, batch: int, trace: Path | None) -> dict[str, Any]:
        """Milliseconds of a step as a whole, and of its parts in every stage."""
        times = [self._burst(batch) for _ in range(WARM_UP + BURSTS)]
        for pipe in self._pipes:
            pipe.send(None)
        parts = [_medians(pipe.recv()) for pipe in self._pipes]
        if trace:
            self._burst(batch, str(trace))
        step_ms = round(statistics.median(times[WARM_UP:]), 3)
        return {"stages": len(self._pipes), "batch": batch, "step_ms": step_ms, "parts": parts}

    def close(self) -> None:
        """End the processes."""
        for pipe, child in zip(self._pipes, self._children, strict=True):
            pipe.send("end")
            child.join()
        self._exchange.close()


def _medians(rows: list[dict[str, float]]) -> dict[str, float]:
    kept = rows[WARM_UP * (STEPS - 1) :]
    return {name: round(statistics.median(row[name] for row in kept), 3) for name in kept[0]} if kept else {}


def main() -> None:
    """Prints one JSON line for every number of stages and of sequences."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--stages", default="1,2")
    parser.add_argument("--batches", default="1,64")
    parser.add_argument("--context", type=int, default=1100)
    parser.add_argument("--trace", type=Path, metavar="FOLDER", help="write a trace of one burst of every kind there")
    parser.add_argument("--setting", action="append", default=[], metavar="KEY=VALUE")
    arguments = parser.parse_args()
    ensure_checkpoint(shape(arguments.shape), arguments.folder, None, "cuda")
    given = dict(item.split("=", 1) for item in arguments.setting)
    settings = {"checkpoint": str(arguments.folder), "kv_pool_tokens": str(80 * 2048), **given}
    batches = [int(batch) for batch in arguments.batches.split(",")]
    for count in map(int, arguments.stages.split(",")):
        stages = Stages(settings, count, max(batches), arguments.context)
        for batch in batches:
            print(json.dumps(stages.measure(batch, arguments.trace) | {"context": arguments.context}), flush=True)
        stages.close()


if __name__ == "__main__":
    main()
