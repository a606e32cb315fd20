"""The figures that the server is to reach on one H200, and how each is found in the records of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

SEAM_MS = 0.8  # two hops a step
FIRST_OVER_FLOOR, AIM_OVER_FLOOR = 1.8, 1.3


@dataclass(frozen=True)
class Target:
    """One line of the table: `phase` and `key` (a dotted path) name the figure in an arm's phases.

    `stages`, `gpus` and `pipelines` say of which server. Where `higher` a larger figure is better.
    """

    label: str
    phase: str
    key: str
    first: float | None
    aim: float | None
    higher: bool = False
    stages: int = 2
    gpus: int = 1
    pipelines: int = 1
    scale: float = 1.0

    def value(self, phases: Mapping[str, Any]) -> float | None:
        """The figure, None where the phase was not run or failed."""
        found: Any = phases.get(self.phase)
        for part in self.key.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        return None if found is None else float(found) * self.scale

    def verdict(self, measured: float | None) -> str:
        """`aim met`, `first target met`, `missed by` so much, or `not measured`; nothing without a target."""
        if measured is None:
            return "not measured"
        if self.first is None or self.aim is None:
            return ""
        if self._reaches(measured, self.aim):
            return "aim met"
        if self._reaches(measured, self.first):
            return "first target met"
        return f"missed by {abs(measured / self.first - 1):.1%}"

    def _reaches(self, measured: float, wanted: float) -> bool:
        return measured >= wanted if self.higher else measured <= wanted


_IMAGE, _TEXT, _TTFT, _TPOT = "image, 1 client", "text, 1 client", "first_token_ms", "per_token_ms"
_IMAGE_64, _TEXT_64, _RATE = "image, 64 at once", "text, 64 at once", "tokens_per_s"
WARM_START = "warm start"
_GB = 1e-9

TARGETS_8B = (
    Target("time per output token, 1 client, image, two stages, ms", _IMAGE, _TPOT, 6.5, 5.3),
    Target("same, one language stage, ms", _IMAGE, _TPOT, 5.9, 5.0, stages=1),
    Target("time to first token, 1 client, image, ms", _IMAGE, _TTFT, 80, 45),
    Target("time to first token, 1 client, 128 text tokens, ms", _TEXT, _TTFT, 20, 12),
    Target("output tokens/s, 64 at once, image", _IMAGE_64, _RATE, 1900, 3000, higher=True),
    Target("output tokens/s, 64 at once, text 128 in", _TEXT_64, _RATE, 7000, 9000, higher=True),
    Target("start-up to ready, warm cache of compiled code, s", WARM_START, "seconds", 120, 45),
    Target("GPU memory beyond weights and KV pool, GB", "memory under load", "beyond", 4, 2.5, scale=_GB),
)
_TWO = (
    Target("two GPUs over one, 64 at once, image", _IMAGE_64, _RATE, 1.5, 1.8, higher=True, gpus=2),
    Target("two GPUs over one, 64 at once, text", _TEXT_64, _RATE, 1.5, 1.8, higher=True, gpus=2),
)
TWO_GPUS = (*_TWO, *(replace(line, label=f"{line.label}, two pipelines", pipelines=2) for line in _TWO))
_PER_TOKEN_TEXT = Target("time per output token, 1 client, text, ms", _TEXT, _TPOT, None, None)


def targets_of(shape: str, floor_ms: float | None) -> tuple[Target, ...]:
    """The lines of a shape's table. The 8B shape has its own; others are measured against the time to read weights."""
    if shape == "8b":
        return (*TARGETS_8B, _PER_TOKEN_TEXT)
    limits = [None if floor_ms is None else over * floor_ms + SEAM_MS for over in (FIRST_OVER_FLOOR, AIM_OVER_FLOOR)]
    per_token, *rest = TARGETS_8B
    others = (replace(line, first=None, aim=None) for line in rest)
    return (replace(per_token, first=limits[0], aim=limits[1]), *others, _PER_TOKEN_TEXT)
