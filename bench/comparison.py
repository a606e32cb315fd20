"""One checkpoint in one number type: the server beside `generate`, in turns, so that a busy machine slows both."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.decode_step import measure_decode_step
from bench.figures import median
from bench.machine import memory_mib, process_tree
from bench.pictures import pictures, questions
from bench.processes import ReferenceProcess, run_load
from bench.records import Case, Record, summary, tokens_per_s
from bench.serving import embedded_server, say
from deepstack_serving.embedded import EmbeddedServer

_WARM_UP = 2


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
    load = os.getloadavg()
    cases = _Cases(folder, plan.max_tokens)
    variables = {"DEEPSTACK_DTYPE": dtype, **plan.variables}
    with embedded_server(checkpoint, variables) as server, ReferenceProcess(checkpoint, dtype) as reference:
        arm = _Arm(server, reference, cases, f"{name}, {dtype}")
        alone = arm.one_client(plan.samples)
        step = measure_decode_step(server, checkpoint, dtype)
        throughput = [arm.throughput(clients, clients * plan.rounds) for clients in plan.clients]
        memory = {"server": memory_mib(process_tree(server.process_id)), "generate": reference.memory_mib()}
    return {
        "checkpoint": name,
        "dtype": dtype,
        "load_average_before": [round(value, 2) for value in load],
        **alone,
        "clients": throughput,
        "memory_mib": memory,
        "decode_step_us": step,
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


@dataclass(frozen=True)
class _Arm:
    server: EmbeddedServer
    reference: ReferenceProcess
    cases: _Cases
    label: str

    def one_client(self, samples: int) -> dict[str, Any]:
        """Requests one after another, each to both; the ratios are medians over the pairs."""
        run_load(self.server.grpc_address, 1, warm_up := self.cases.take(_WARM_UP))
        for case in warm_up:
            self.reference.measure(case)
        pairs: list[tuple[Record, Record]] = []
        for index, case in enumerate(self.cases.take(samples)):
            say(f"{self.label}: one client, sample {index + 1} of {samples} ...")
            theirs = self.reference.measure(case)
            (ours,), _ = run_load(self.server.grpc_address, 1, [case])
            pairs.append((ours, theirs))
        return {
            "server": summary([ours for ours, _ in pairs]),
            "generate": summary([theirs for _, theirs in pairs]),
            "first_token_over_generate": median([ours.first_s / theirs.first_s for ours, theirs in pairs]),
            "per_token_over_generate": median([ours.per_token_s / theirs.per_token_s for ours, theirs in pairs]),
            "same_prompt_lengths": sum(ours.input_tokens == theirs.input_tokens for ours, theirs in pairs),
            "same_texts": sum(ours.text == theirs.text for ours, theirs in pairs),
        }

    def throughput(self, clients: int, requests: int) -> dict[str, Any]:
        """So many clients at once, and `generate` alone right before and right after."""
        say(f"{self.label}: {clients} clients, {requests} requests ...")
        before, after = self.cases.take(1), self.cases.take(1)
        theirs = [self.reference.measure(case) for case in before]
        records, wall_s = run_load(self.server.grpc_address, clients, self.cases.take(requests))
        theirs += [self.reference.measure(case) for case in after]
        ours_per_s = sum(record.tokens for record in records) / wall_s
        return {
            "clients": clients,
            "requests": requests,
            "wall_s": wall_s,
            "tokens_per_s": ours_per_s,
            "generate_tokens_per_s": tokens_per_s(theirs),
            "over_generate": ours_per_s / tokens_per_s(theirs),
        }
