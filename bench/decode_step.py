"""Where the time of one decode step goes: at the client, inside Triton's call of the stages, inside the stages."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.processes import run_json, run_load
from bench.records import Case
from bench.serving import ModelStatistics, say, statistics_of
from bench.stage_floor import NAMES as STAGES
from deepstack_serving.embedded import EmbeddedServer

_TOKENS = 128
_MICROSECONDS = 1e6
_NANOSECONDS_PER_US = 1e3


def measure_decode_step(server: EmbeddedServer, checkpoint: Path, dtype: str) -> dict[str, Any]:
    """A long answer to a short text: nearly every execution of the stages is a decode step of one row.

    `triton_compute` is Triton's own time per execution, its way into the stage's process and back among it;
    `stages_alone` is the same step by the same code in one process, without Triton.
    """
    say("one decode step ...")
    before = _stage_statistics(server)
    (record,), _ = run_load(server.grpc_address, 1, [Case(None, "Hello", _TOKENS)])
    after = _stage_statistics(server)
    floor = run_json("bench.stage_floor", [str(checkpoint.absolute()), dtype, "1"])
    return figures(
        record.per_token_s * _MICROSECONDS, {name: after[name].since(before[name]) for name in STAGES}, floor
    )


def figures(
    client_us: float, inside: Mapping[str, ModelStatistics], stages_alone_us: Mapping[str, float]
) -> dict[str, Any]:
    """Everything in microseconds."""
    triton = {name: item.compute_infer_ns / item.executions / _NANOSECONDS_PER_US for name, item in inside.items()}
    return {
        "client": client_us,
        "triton_compute": triton,
        "stages_alone": dict(stages_alone_us),
        "outside_triton_compute": client_us - sum(triton.values()),
        "outside_stages": client_us - sum(stages_alone_us.values()),
    }


def _stage_statistics(server: EmbeddedServer) -> dict[str, ModelStatistics]:
    return {name: statistics_of(server.http_address, name) for name in STAGES}
