"""Where the time of a step and of a first token goes: Triton's own counts of each model beside the client's clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.serving import ModelStatistics, statistics_of

PARTS = ("queue", "compute_input", "compute_infer", "compute_output")
_MICROSECONDS = 1e6
_NANOSECONDS_PER_US = 1e3

Counts = Mapping[str, ModelStatistics]


def read_counts(http_address: str, models: Sequence[str]) -> dict[str, ModelStatistics]:
    return {model: statistics_of(http_address, model) for model in models}


def profile(before: Counts, after: Counts, units: int, client_s: float) -> dict[str, Any]:
    """Microseconds of each model per unit of work (a decode step, a request); `client_s` is one unit's at the client.

    `executions` is per unit too: below 1 where one call does several steps. A call's way into the model's process and
    back is in its `compute_infer`. The orchestrator's own counts end when a request is taken in, so what the models
    leave of the client's time is the orchestrator, the hops and the client.
    """
    models = {name: _per_unit(after[name].since(before[name]), units) for name in before}
    inside = sum(part for row in models.values() for part in (row[name] for name in PARTS))
    client_us = client_s * _MICROSECONDS
    return {"units": units, "client_us": client_us, "models": models, "outside_us": client_us - inside}


def _per_unit(counts: ModelStatistics, units: int) -> dict[str, float]:
    times = {name: getattr(counts, f"{name}_ns") / units / _NANOSECONDS_PER_US for name in PARTS}
    return {"executions": counts.executions / units, **times}


def rows(result: Mapping[str, Any]) -> list[list[object]]:
    """The lines of one profile's table: model, executions, the four parts and their sum."""
    lines: list[list[object]] = [
        [name, row["executions"], *(row[part] for part in PARTS), sum(row[part] for part in PARTS)]
        for name, row in result["models"].items()
    ]
    outside: list[object] = ["outside of all of them", None, None, None, None, None, result["outside_us"]]
    client: list[object] = ["at the client", None, None, None, None, None, result["client_us"]]
    return [*lines, outside, client]


COLUMNS = ("us per unit", "executions", *PARTS, "sum")
