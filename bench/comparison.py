"""One checkpoint in one number type: the server beside `generate`, in turns, so that a busy machine slows both."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.figures import MILLISECONDS
from bench.machine import memory_mib, process_tree
from bench.pictures import pictures, questions
from bench.processes import ReferenceProcess, run_json, run_load
from bench.records import Case, Record, summary
from bench.serving import MODELS, ModelStatistics, embedded_server, say, statistics_of
from bench.stage_floor import NAMES as STAGES
from deepstack_serving.embedded import EmbeddedServer

_WARM_UP = 2
_DECODE_TOKENS = 128
_MICROSECONDS = 1e6
_NANOSECONDS_PER_US = 1e3


@dataclass(frozen=True)
class Plan:
    """How much is measured. `variables` go to the server's environment only."""

    samples: int
    clients: tuple[int, ...]
    rounds: int
    max_tokens: int
    variables: Mapping[str, str]


def compare(name: str, checkpoint: Path, dtype: str, plan: Plan, folder: Path) -> dict[str, Any]:
    """Every figure of one arm. Needs an empty folder for its pictures."""
    say(f"{name}, {dtype}: starting the server and transformers ...")
    cases = _Cases(folder, plan.max_tokens)
    variables = {"DEEPSTACK_DTYPE": dtype, **plan.variables}
    with embedded_server(checkpoint, variables) as server, ReferenceProcess(checkpoint, dtype) as reference:
        alone = _one_client(server, reference, cases, plan, f"{name}, {dtype}")
        step = _decode_step(server)
        throughput = _throughput(server, cases, plan, f"{name}, {dtype}")
        memory = {
            "server": memory_mib(process_tree(server.process_id)),
            "generate": reference.memory_mib(),
        }
    say(f"{name}, {dtype}: the stages alone ...")
    floor = run_json("bench.stage_floor", [str(checkpoint.absolute()), dtype, "1"])
    return {
        "checkpoint": name,
        "dtype": dtype,
        **alone,
        "clients": throughput,
        "memory_mib": memory,
        "decode_step_us": _step_figures(step, floor),
    }


class _Cases:
    """Requests with pictures that no request before had, so that no cache answers."""

    def __init__(self, folder: Path, max_tokens: int) -> None:
        self._folder, self._max_tokens, self._used = folder, max_tokens, 0

    def take(self, count: int) -> list[Case]:
        made = []
        for picture, question in zip(pictures(count, self._used), questions(count), strict=True):
            path = self._folder / f"{self._used}.jpg"
            path.write_bytes(picture)
            self._used += 1
            made.append(Case(str(path), question, self._max_tokens))
        return made


def _one_client(
    server: EmbeddedServer, reference: ReferenceProcess, cases: _Cases, plan: Plan, label: str
) -> dict[str, Any]:
    run_load(server.grpc_address, 1, warm_up := cases.take(_WARM_UP))
    for case in warm_up:
        reference.measure(case)
    ours: list[Record] = []
    theirs: list[Record] = []
    for index, case in enumerate(cases.take(plan.samples)):
        say(f"{label}: one client, sample {index + 1} of {plan.samples} ...")
        theirs.append(reference.measure(case))
        ours += run_load(server.grpc_address, 1, [case])[0]
    pairs = list(zip(ours, theirs, strict=True))
    return {
        "server": summary(ours),
        "generate": summary(theirs),
        "same_prompt_lengths": sum(own.input_tokens == other.input_tokens for own, other in pairs),
        "same_texts": sum(own.text == other.text for own, other in pairs),
    }


def _throughput(server: EmbeddedServer, cases: _Cases, plan: Plan, label: str) -> list[dict[str, Any]]:
    results = []
    for clients in plan.clients:
        requests = cases.take(clients * plan.rounds)
        say(f"{label}: {clients} clients, {len(requests)} requests ...")
        records, wall_s = run_load(server.grpc_address, clients, requests)
        tokens = sum(record.tokens for record in records)
        results.append({"clients": clients, "requests": len(records), "wall_s": wall_s, "tokens_per_s": tokens / wall_s})
    return results


@dataclass(frozen=True)
class _Step:
    client_us: float
    inside: Mapping[str, ModelStatistics]


def _decode_step(server: EmbeddedServer) -> _Step:
    """A long answer to a short text: nearly every execution of the stages is a decode step of one row."""
    before = _stage_statistics(server)
    (record,), _ = run_load(server.grpc_address, 1, [Case(None, "Hello", _DECODE_TOKENS)])
    after = _stage_statistics(server)
    return _Step(record.per_token_s * _MICROSECONDS, {name: after[name].since(before[name]) for name in STAGES})


def _stage_statistics(server: EmbeddedServer) -> dict[str, ModelStatistics]:
    return {name: statistics_of(server.http_address, name) for name in STAGES}


def _step_figures(step: _Step, floor: Mapping[str, float]) -> dict[str, Any]:
    """Triton's times contain its own way into the stage's process; the stages alone are what `run` takes without it."""
    triton = {
        name: item.compute_infer_ns / item.executions / _NANOSECONDS_PER_US for name, item in step.inside.items()
    }
    return {
        "client": step.client_us,
        "triton_compute": triton,
        "stages_alone": dict(floor),
        "outside_triton_compute": step.client_us - sum(triton.values()),
        "outside_stages": step.client_us - sum(floor.values()),
    }


def targets(result: Mapping[str, Any]) -> dict[str, float | None]:
    """The two ratios that the project sets itself targets for."""
    generate = result["generate"]["tokens_per_s"]
    at_8 = next((item["tokens_per_s"] for item in result["clients"] if item["clients"] == 8), None)
    return {
        "per_token_over_generate": result["server"]["per_token_ms"] / result["generate"]["per_token_ms"],
        "throughput_at_8_over_generate": at_8 / generate if at_8 else None,
    }
