"""The Markdown of all results: per shape the table of targets, loads, starts and memory, profiles, and what failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from bench.figures import markdown_table
from bench.gpu import profile
from bench.gpu.results import BATCHED, EAGER, LIMITS, SERVER, STATIC, VLLM, Arm, Results, by_shape
from bench.gpu.shapes import shape as shape_of
from bench.gpu.targets import TWO_GPUS, Target, targets_of

_TARGET_COLUMNS = ("", "generate", "static, compiled", "vLLM", "first target", "aim", "measured", "")
_LOAD_COLUMNS = (
    "requests",
    "clients",
    "tokens/s",
    "requests/s",
    "first p50 ms",
    "p95",
    "per token p50 ms",
    "p95",
    "whole p50 ms",
)
_PROFILE = "profile of "


def report(runs: Sequence[Mapping[str, Any]]) -> str:
    """Everything, as one Markdown text."""
    heads = [_head(run) for run in runs]
    return "\n\n".join(
        ["# GPU benchmark", *heads, *(_shape(name, results) for name, results in by_shape(runs).items())]
    )


def _head(run: Mapping[str, Any]) -> str:
    gpus = ", ".join(
        f"{gpu['name']} ({gpu['memory.total']} MiB, driver {gpu['driver_version']})" for gpu in run["gpus"]
    )
    versions = ", ".join(f"{name} {version}" for name, version in run["packages"].items() if version != "not installed")
    return (
        f"{run['date']}: `{run['command']}`\n\n{gpus or 'no GPU'}; {run['cores']} cores of {run['processor']}; "
        f"python {run['python']}, {versions}"
    )


def _shape(name: str, results: Results) -> str:
    parts = [f"## {shape_of(name).title}, random weights", targets_table(name, results), _limits(results)]
    for arm in results.named(SERVER):
        parts += [f"### Server: {arm.label}", _loads(arm), _starts(arm), _memory(arm), *_profiles(arm)]
    parts.append(_failures(results))
    return "\n\n".join(part for part in parts if part)


def targets_table(name: str, results: Results) -> str:
    """`generate` has continuous batching's figure where many text requests are in flight."""
    lines = [_target_row(target, results) for target in targets_of(name, results.floor_ms)]
    lines += [row for target in TWO_GPUS if (row := _two_gpus_row(target, results)) is not None]
    return markdown_table(_TARGET_COLUMNS, lines)


def _target_row(target: Target, results: Results) -> list[object]:
    measured = results.measured(target)
    generate = results.peer(EAGER, target)
    peers = [results.peer(BATCHED, target) if generate is None else generate]
    peers += [results.peer(name, target) for name in (STATIC, VLLM)]
    return [target.label, *peers, target.first, target.aim, measured, target.verdict(measured)]


def _two_gpus_row(target: Target, results: Results) -> list[object] | None:
    """How many times the throughput of one GPU; no line where two were not measured."""
    two, one = results.measured(target), results.measured(replace(target, gpus=1, pipelines=1))
    if two is None:
        return None
    ratio = two / one if one else None
    return [target.label, None, None, None, target.first, target.aim, ratio, target.verdict(ratio)]


def _limits(results: Results) -> str:
    copy, product = results.phase(LIMITS, "copy"), results.phase(LIMITS, "matrix product")
    floor = results.floor_ms
    lines = []
    if copy:
        lines.append(f"copy within the device's memory {copy['bytes_per_s'] / 1e12:.2f} TB/s, read and written")
    if product:
        lines.append(f"bfloat16 matrix product {product['flop_per_s'] / 1e12:.0f} TFLOP/s")
    if floor:
        lines.append(f"reading the weights of one decode step {floor:.2f} ms")
    return f"Limits: {'; '.join(lines)}." if lines else ""


def _loads(arm: Arm) -> str:
    rows = [_load_row(name, result) for name, result in arm.phases().items() if "at once" in name or "1 client" in name]
    found = [row for row in rows if row is not None]
    return markdown_table(_LOAD_COLUMNS, found) if found else ""


def _load_row(name: str, result: Mapping[str, Any]) -> list[object] | None:
    if name.startswith(_PROFILE):
        return None
    if "clients" not in result:
        return [
            name,
            1,
            result["tokens_per_s"],
            None,
            result["first_token_ms"],
            None,
            result["per_token_ms"],
            None,
            None,
        ]
    first, token = (result[key] or {} for key in ("first_token_ms", "per_token_ms"))
    rates = [result["clients"], result["tokens_per_s"], result["requests_per_s"]]
    return [
        name,
        *rates,
        first.get("p50"),
        first.get("p95"),
        token.get("p50"),
        token.get("p95"),
        result["whole_ms"]["p50"],
    ]


def _starts(arm: Arm) -> str:
    starts = [(name, result) for name, result in arm.phases().items() if name.startswith("start ")]
    texts = [
        f"{result['seconds']:.1f} s {'with' if result['compiled_code_was_there'] else 'without'} compiled code on disk"
        for _, result in starts
    ]
    return f"Start-up: {'; '.join(texts)}." if texts else ""


def _memory(arm: Arm) -> str:
    lines = []
    for name in ("memory at start", "memory under load"):
        result = arm.phases().get(name, {})
        if "used" in result:
            used, weights, pool, beyond = (result[key] / 1e9 for key in ("used", "weights", "kv_pool", "beyond"))
            lines.append(
                f"{name}: {used:.2f} GB in use = weights {weights:.2f} GB + KV pool {pool:.2f} GB + {beyond:.2f} GB"
            )
    return "\n".join(lines)


def _profiles(arm: Arm) -> list[str]:
    found = {name: result for name, result in arm.phases().items() if name.startswith(_PROFILE)}
    return [f"{name}\n\n{markdown_table(profile.COLUMNS, profile.rows(result))}" for name, result in found.items()]


def _failures(results: Results) -> str:
    rows: list[list[object]] = [
        [arm.name, phase, error.replace("\n", " ").replace("|", "/")[:300]]
        for arm in results.arms
        for phase, error in arm.failures()
    ]
    return f"### Failed\n\n{markdown_table(('arm', 'phase', 'error'), rows)}" if rows else ""
