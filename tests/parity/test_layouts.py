"""Checkpoints in the hub's layouts answer like the same weights as transformers writes them, to the last bit."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from deepstack_serving.attention import ATTENTION
from deepstack_serving.checkpoint import open_checkpoint
from deepstack_serving.injection import plan_stages
from deepstack_serving.stages.loading import load_language_stage, load_vision_stage
from tests.support import layouts
from tests.support.runs import Run, run

QWEN = ("qwen3_vl", "qwen3_vl_moe")
LAYOUTS = [
    *((family, layouts.without_prefix) for family in (*QWEN, "granite4_vision")),
    *((family, layouts.vision_without_prefix) for family in QWEN),
    ("qwen3_vl_moe", layouts.experts_transposed),
    ("granite4_vision", layouts.tower_nested),
]


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / checkpoint.name))


@pytest.fixture
def bf16_copy(bf16_checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bf16_checkpoint, tmp_path / bf16_checkpoint.name))


def names(folder: Path) -> set[str]:
    return {name for file in folder.glob("*.safetensors") for name in load_file(file)}


@pytest.mark.parametrize(("checkpoint", "change"), LAYOUTS, indirect=["checkpoint"])
def test_other_layout_answers_the_same(copy: Path, unsplit: Run, change: layouts.Change) -> None:
    before = {file.name: file.read_bytes() for file in copy.glob("*.safetensors")}
    layouts.rewrite(copy, change)
    assert before != {file.name: file.read_bytes() for file in copy.glob("*.safetensors")}
    assert run(copy) == unsplit


@pytest.mark.parametrize(
    ("checkpoint", "change"),
    [("qwen3_vl_moe", layouts.experts_transposed), ("qwen3_vl", layouts.without_prefix)],
    indirect=["checkpoint"],
)
def test_stages_hold_every_weight_of_another_layout_once(copy: Path, change: layouts.Change) -> None:
    opened = open_checkpoint(layouts.rewrite(copy, change))
    plans = plan_stages(opened.layer_count, 4, None, opened.deepstack_layers)
    stages = [
        load_vision_stage(opened, "cpu"),
        *(load_language_stage(opened, plan, "cpu", ATTENTION) for plan in plans),
    ]
    held = sum(parameter.nbytes for stage in stages for parameter in stage.parameters())
    assert held == sum(weight.nbytes for file in copy.glob("*.safetensors") for weight in load_file(file).values())


def test_older_config_answers_the_same(copy: Path, unsplit: Run) -> None:
    assert run(layouts.edit_config(copy, layouts.older_config)) == unsplit


def test_tied_head_is_in_no_file(bf16_checkpoint: Path) -> None:
    assert not any("lm_head" in name for name in names(bf16_checkpoint))


def test_tied_head_that_is_written_too_answers_the_same(bf16_copy: Path, bf16_checkpoint: Path) -> None:
    file = next(
        file for file in bf16_copy.glob("*.safetensors") if any("embed_tokens" in name for name in load_file(file))
    )
    weights = load_file(file)
    embedding = next(weight for name, weight in weights.items() if "embed_tokens" in name)
    save_file({**weights, "lm_head.weight": embedding.clone()}, file, metadata={"format": "pt"})
    layouts.rewrite(bf16_copy, lambda name, weight: (name, weight))
    assert run(bf16_copy) == run(bf16_checkpoint)


def test_wrong_layout_would_be_seen(copy: Path, unsplit: Run) -> None:
    """The control arm: weights swapped between two layers of one shape load, and answer otherwise."""

    def swapped(name: str, weight: torch.Tensor) -> tuple[str, torch.Tensor]:
        for here, there in ((".layers.0.", ".layers.1."), (".layers.1.", ".layers.0.")):
            if here in name and "self_attn.q_proj" in name and "language_model" in name:
                return name.replace(here, there), weight
        return name, weight

    assert run(layouts.rewrite(copy, swapped)) != unsplit
