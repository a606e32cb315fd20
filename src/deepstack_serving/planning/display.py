"""A plan as text for people, and as JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import groupby

from deepstack_serving.command_line import table
from deepstack_serving.planning import GIBIBYTE
from deepstack_serving.planning.deployment import DeploymentPlan, GpuPlan, ModelPlan
from deepstack_serving.settings import PREFIX
from deepstack_serving.wire import deepstack_name

_KIBIBYTE = 1 << 10


def as_json(plan: DeploymentPlan) -> str:
    """One object; sizes in bytes, layers [first_layer, end_layer)."""
    return json.dumps({**asdict(plan), "fits": plan.fits}, indent=1) + "\n"


def as_text(plan: DeploymentPlan) -> str:
    """Tables, and the settings that make the plan real."""
    features = ", ".join(map(str, plan.deepstack_layers)) or "none"
    head = f"{plan.model_type}, {plan.layers} layers, {plan.dtype}; deepstack features for layers {features}\n"
    blocks = [head + _split(plan), _models(plan), _crossings(plan), _gpus(plan), _settings(plan)]
    return "\n".join(blocks)


def warnings(plan: DeploymentPlan) -> list[str]:
    """One sentence for each GPU that is too small."""
    return [_too_small(gpu) for gpu in plan.gpus if gpu.fits is False]


def _too_small(gpu: GpuPlan) -> str:
    size, pool = gpu.memory_bytes or 0, gpu.kv_pool_bytes or 0
    text = f"GPU {gpu.gpu}: {_gib(gpu.parameter_bytes)} parameters and {_gib(pool)} KV pools exceed its {_gib(size)}"
    if gpu.parameter_bytes < size:
        share = int((size - gpu.parameter_bytes) / size * 100) / 100
        return f"{text}; keep kv_memory_fraction below {share:.2f}" if share else text
    return f"{text}; take more or larger GPUs"


def _split(plan: DeploymentPlan) -> str:
    def listed(points: Iterable[int]) -> str:
        return ",".join(map(str, points)) or "none"

    if plan.split_points == plan.suggested_split_points:
        return f"split points {listed(plan.split_points)}: parameters are balanced over the GPUs\n"
    return f"split points {listed(plan.split_points)}; balanced would be {listed(plan.suggested_split_points)}\n"


def _models(plan: DeploymentPlan) -> str:
    header = ("model", "GPU", "layers", "parameters", "KV per token", "features in", "features out")
    total = ("total", "", str(plan.layers), _gib(plan.parameter_bytes), _kib(plan.kv_bytes_per_token), "", "")
    return table([header, *map(_model, plan.models), total])


def _model(model: ModelPlan) -> tuple[str, ...]:
    layers = f"{model.first_layer}-{model.end_layer - 1}" if model.end_layer > model.first_layer else "-"
    kv = _kib(model.kv_bytes_per_token) if model.kv_bytes_per_token else "-"
    return (
        model.name,
        str(model.gpu),
        layers,
        _gib(model.parameter_bytes),
        kv,
        _features(model.receives),
        _features(model.forwards),
    )


def _crossings(plan: DeploymentPlan) -> str:
    """One line for all tensors of one kind between two models."""
    rows: list[tuple[str, ...]] = [("from", "to", "tensors", "shape of each", "bytes of a row")]
    alike = groupby(plan.crossings, lambda item: (item.sender, item.receiver, item.rows, item.width, item.dtype))
    for (sender, receiver, kind, width, dtype), group in alike:
        tensors = list(group)
        names = " ".join(item.tensor for item in tensors)
        rows.append((sender, receiver, names, f"[{kind}, {width}] {dtype}", f"{tensors[0].bytes_per_row} each"))
    return table(rows)


def _gpus(plan: DeploymentPlan) -> str:
    if all(gpu.memory_bytes is None for gpu in plan.gpus):
        return "memory of the GPUs is not known; name it with --gpu-memory-gib\n"
    rows: list[tuple[str, ...]] = [("GPU", "memory", "parameters", "KV pools", "left", "KV tokens", "fits")]
    for gpu in plan.gpus:
        size, pool = gpu.memory_bytes or 0, gpu.kv_pool_bytes or 0
        sizes = (_gib(size), _gib(gpu.parameter_bytes), _gib(pool), _gib(size - gpu.parameter_bytes - pool))
        tokens = "-" if gpu.kv_tokens is None else f"{gpu.kv_tokens:,}"
        rows.append((str(gpu.gpu), *sizes, tokens, "yes" if gpu.fits else "NO"))
    return table(rows) + "what is left must hold activations and CUDA itself, for each model on the GPU\n"


def _settings(plan: DeploymentPlan) -> str:
    points = ",".join(map(str, plan.split_points))
    devices = ",".join(f"{model.name}=cuda:{model.gpu}" for model in plan.models)
    return f"{PREFIX}SPLIT_POINTS={points}\n{PREFIX}DEVICES={devices}\n"


def _features(layers: Sequence[int]) -> str:
    return " ".join(map(deepstack_name, layers)) or "-"


def _gib(size: int) -> str:
    return f"{size / GIBIBYTE:.2f} GiB"


def _kib(size: int) -> str:
    return f"{size / _KIBIBYTE:g} KiB"
