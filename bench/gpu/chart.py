"""Throughput against latency over the number of clients, as PNG and SVG; needs matplotlib, the extra `bench`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.gpu.results import SERVER, VLLM, Results
from bench.gpu.shapes import shape as shape_of

_KINDS = ("image", "text")
_FORMATS = ("png", "svg")

Points = list[tuple[int, float, float]]


def levels(phases: dict[str, Any], kind: str) -> Points:
    """(clients, milliseconds per token, tokens per second), ascending; streamed loads only."""
    points: Points = []
    for name, result in phases.items():
        if name == f"{kind}, 1 client":
            points.append((1, result["per_token_ms"], result.get("tokens_per_s") or 1e3 / result["per_token_ms"]))
        elif name.startswith(f"{kind}, ") and result.get("per_token_ms"):
            points.append((result["clients"], result["per_token_ms"]["p50"], result["tokens_per_s"]))
    return sorted(points)


def draw(name: str, results: Results, folder: Path, stem: str) -> list[Path]:
    """The files that were written. Raises ImportError where matplotlib is not installed."""
    import matplotlib as mpl  # an optional extra

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(_KINDS), figsize=(11, 4.5), layout="constrained")
    for kind, place in zip(_KINDS, axes, strict=True):
        for arm in results.named(SERVER):
            _line(place, levels(arm.phases(), kind), arm.label)
        _peer(place, results, kind)
        place.set(
            title=f"{kind} requests", xlabel="time per output token, median, ms", ylabel="output tokens per second"
        )
        place.set(xlim=(0, None), ylim=(0, None))
        place.grid(alpha=0.3)
        if place.get_legend_handles_labels()[0]:
            place.legend(fontsize=8)
    figure.suptitle(f"{shape_of(name).title}: throughput against latency, a point per number of clients")
    paths = [folder / f"{stem}.{kind}" for kind in _FORMATS]
    for path in paths:
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)
    return paths


def _line(place: Any, points: Sequence[tuple[int, float, float]], label: str) -> None:
    if points:
        place.plot([point[1] for point in points], [point[2] for point in points], marker="o", label=label)
    for clients, per_token_ms, rate in points:
        place.annotate(str(clients), (per_token_ms, rate), textcoords="offset points", xytext=(4, -10), fontsize=8)


def _peer(place: Any, results: Results, kind: str) -> None:
    """vLLM's offline engine tells its throughput alone, without a time per token at many."""
    many = results.phase(VLLM, f"{kind}, 64 at once")
    if many:
        place.axhline(many["tokens_per_s"], linestyle="--", color="gray", label="vLLM, 64 at once")
