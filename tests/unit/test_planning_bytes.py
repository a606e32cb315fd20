"""The bytes that a plan counts are those that the loader loads, and those in the weight files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

from deepstack_serving.attention import ATTENTION
from deepstack_serving.checkpoint import Checkpoint, open_checkpoint
from deepstack_serving.injection import StagePlan, plan_stages
from deepstack_serving.planning.deployment import GpuMemory, plan_deployment
from deepstack_serving.planning.sizes import measure, parameter_bytes, stage_bytes
from deepstack_serving.stages.loading import load_language_stage, load_vision_stage, stage_skeleton
from tests.support.tiny import TinyShape, write_checkpoint
from tests.support.tiny_granite import TinyGraniteShape, write_granite_checkpoint
from tests.support.tiny_moe import TinyMoeShape

FAMILIES: dict[str, tuple[Callable[[Path, Any], Path], Any]] = {
    "dense": (write_checkpoint, TinyShape()),
    "experts": (write_checkpoint, TinyMoeShape()),
    "many levels": (write_granite_checkpoint, TinyGraniteShape()),
}


@pytest.fixture(scope="module", params=[(name, tied) for name in FAMILIES for tied in (False, True)], ids=str)
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    name, tied = request.param
    write, shape = FAMILIES[name]
    dtype = torch.bfloat16 if tied else torch.float32
    return open_checkpoint(
        write(tmp_path_factory.mktemp("bytes") / "checkpoint", replace(shape, tied=tied, dtype=dtype))
    )


def stages_of(checkpoint: Checkpoint, count: int) -> tuple[StagePlan | None, ...]:
    return (None, *plan_stages(checkpoint.layer_count, count, None, checkpoint.deepstack_layers))


def load(checkpoint: Checkpoint, plan: StagePlan | None) -> nn.Module:
    if plan is None:
        return load_vision_stage(checkpoint, "cpu")
    return load_language_stage(checkpoint, plan, "cpu", ATTENTION)


def parameters(module: nn.Module) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (value.shape, value.dtype) for name, value in module.named_parameters()}


def stored_bytes(folder: Path) -> int:
    total = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as weights:
            total += sum(weights.get_tensor(name).nbytes for name in weights.keys())  # noqa: SIM118
    return total


def test_counted_parameters_are_the_loaded_ones(opened: Checkpoint) -> None:
    for plan in stages_of(opened, 3):
        loaded, counted = load(opened, plan), stage_skeleton(opened, plan)
        assert parameters(counted) == parameters(loaded)
        assert parameter_bytes(counted) == parameter_bytes(loaded)
        assert all(value.is_meta for value in counted.parameters())


def test_all_counted_parameters_are_the_stored_ones(opened: Checkpoint) -> None:
    counted = {
        name: value.nbytes
        for plan in stages_of(opened, 1)
        for name, value in stage_skeleton(opened, plan).named_parameters()
    }
    assert sum(counted.values()) == stored_bytes(opened.folder)


@pytest.mark.parametrize("count", [2, 4])
def test_bytes_of_a_stage_are_the_sum_of_its_parts(opened: Checkpoint, count: int) -> None:
    parts = measure(opened)
    for plan in stages_of(opened, count):
        if plan is None:
            assert stage_bytes(opened, plan) == parts.vision
            continue
        ends = parts.first * plan.is_first + parts.last * plan.is_last
        layers = sum(parts.layers[plan.first_layer : plan.end_layer])
        assert stage_bytes(opened, plan) == parts.every + ends + layers


def test_counting_leaves_the_config_as_it_was(opened: Checkpoint) -> None:
    """transformers notes which attention a model takes in the config that the model was made from."""
    plan_deployment(opened, 2, None, GpuMemory())
    configs = (opened.config, opened.config.text_config, opened.config.vision_config)
    assert [config._attn_implementation for config in configs] == [None] * 3
