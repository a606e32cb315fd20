"""Adapters: merged weights are those made by hand, each stage merges its own, and what is not served is refused."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForImageTextToText
from transformers.integrations import peft as peft_integration

from deepstack_serving.attention import ATTENTION
from deepstack_serving.checkpoint import open_checkpoint
from deepstack_serving.errors import CheckpointError
from deepstack_serving.injection import plan_stages
from deepstack_serving.stages.loading import load_language_stage, load_vision_stage
from tests.support.adapter import ALPHA, CONFIG, RANK, WEIGHTS, merge_by_hand, weights_of, write_adapter
from tests.support.asking import MIXED
from tests.support.runs import run

LAYER = "model.language_model.layers.{}"
EARLY, LATE = LAYER.format(1) + ".self_attn.q_proj", LAYER.format(4) + ".mlp.down_proj"
VISION, HEAD = "model.visual.blocks.2.attn.qkv", "lm_head"
MODULES = (EARLY, LATE, VISION, HEAD)


@pytest.fixture
def folder(checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "with adapter"))


def stages_of(folder: Path, *, merge: bool = True, stages: int = 2) -> Iterator[nn.Module]:
    opened = open_checkpoint(folder, merge_adapter=merge)
    plans = plan_stages(opened.layer_count, stages, None, opened.deepstack_layers)
    yield load_vision_stage(opened, "cpu")
    yield from (load_language_stage(opened, plan, "cpu", ATTENTION) for plan in plans)


def merged(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of all stages together."""
    return {name: value for stage in stages_of(folder) for name, value in stage.named_parameters()}


def change_config(folder: Path, **values: object) -> None:
    content = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**content, **values}))


@pytest.mark.parametrize(
    ("values", "ranks", "scales"),
    [
        ({}, {}, {}),
        ({"use_rslora": True}, {}, dict.fromkeys(MODULES, ALPHA / math.sqrt(RANK))),
        ({"rank_pattern": {"q_proj": 2}}, {EARLY: 2}, {EARLY: ALPHA / 2}),
        ({"alpha_pattern": {r"layers\.\d+\.mlp\.down_proj": 8}}, {}, {LATE: 8 / RANK}),
    ],
    ids=["plain", "rank-stabilised", "rank pattern", "alpha pattern"],
)
def test_merged_weights_are_those_made_by_hand(
    folder: Path, tmp_path: Path, values: dict[str, object], ranks: dict[str, int], scales: dict[str, float]
) -> None:
    write_adapter(folder, MODULES, ranks, **values)
    found, base = merged(folder), weights_of(folder)
    by_hand = Path(shutil.copytree(folder, tmp_path / "by hand"))
    merge_by_hand(by_hand, scales)
    expected = weights_of(by_hand)
    assert found.keys() == expected.keys()
    assert sorted(name for name in base if not torch.equal(base[name], found[name])) == sorted(
        f"{name}.weight" for name in MODULES
    )
    for name, value in found.items():
        torch.testing.assert_close(value.data, expected[name], atol=1e-6, rtol=0)


def test_weight_keeps_its_number_type(bf16_checkpoint: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(bf16_checkpoint, tmp_path / "bf16"))
    found = merged(write_adapter(folder, (EARLY, LATE)))
    merge_by_hand(folder)
    expected = weights_of(folder)
    assert {value.dtype for value in found.values()} == {torch.bfloat16}
    assert all(torch.equal(found[f"{name}.weight"], expected[f"{name}.weight"]) for name in (EARLY, LATE))


def test_answers_are_those_of_the_weights_merged_by_hand(folder: Path, checkpoint: Path) -> None:
    served = run(write_adapter(folder, MODULES), merge_adapter=True)
    merge_by_hand(folder)
    expected = run(folder)
    assert [item.ids for item in served.alone] == [item.ids for item in expected.alone]
    assert max(mine.distance(other) for mine, other in zip(served.alone, expected.alone, strict=True)) < 1e-4
    assert len(MIXED) == len(served.alone)
    assert [item.ids for item in served.alone] != [item.ids for item in run(checkpoint).alone]


def test_each_stage_merges_its_own_layers_only(folder: Path) -> None:
    """A delta that does not fit stops the stage that it belongs to; the others do not even read it."""
    write_adapter(folder, (EARLY, LATE))
    tensors = load_file(folder / WEIGHTS)
    tensors[f"base_model.model.{LATE}.lora_B.weight"] = torch.zeros(3, RANK)
    save_file(tensors, folder / WEIGHTS)
    stages = stages_of(folder)
    vision, early = next(stages), next(stages)
    assert not any("language_model" in name for name, _ in vision.named_parameters())
    assert not torch.equal(early.get_parameter(f"{EARLY}.weight"), weights_of(folder)[f"{EARLY}.weight"])
    with pytest.raises(CheckpointError, match=rf"{WEIGHTS}: '{LATE}' adds \[3, 128\] to a weight of \[64, 128\]"):
        next(stages)


def test_names_without_the_models_prefix_are_merged(folder: Path) -> None:
    write_adapter(folder, (EARLY, VISION))
    tensors = {name.replace(".model.model.", ".model."): value for name, value in load_file(folder / WEIGHTS).items()}
    expected = merged(folder)
    save_file(tensors, folder / WEIGHTS)
    assert all(torch.equal(value, expected[name]) for name, value in merged(folder).items())


def test_installed_peft_changes_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = merged(write_adapter(folder, MODULES))
    monkeypatch.setattr(peft_integration, "is_peft_available", lambda: True)
    assert all(torch.equal(value, expected[name]) for name, value in merged(folder).items())
    with pytest.raises(ImportError):  # what transformers does by itself
        AutoModelForImageTextToText.from_pretrained(folder)


def test_adapter_is_part_of_the_fingerprint(folder: Path) -> None:
    without = open_checkpoint(folder).fingerprint
    write_adapter(folder, (EARLY,))
    prints = [without, open_checkpoint(folder, merge_adapter=True).fingerprint]
    change_config(folder, lora_alpha=7)
    prints.append(open_checkpoint(folder, merge_adapter=True).fingerprint)
    save_file({name: value + 1 for name, value in load_file(folder / WEIGHTS).items()}, folder / WEIGHTS)
    prints.append(open_checkpoint(folder, merge_adapter=True).fingerprint)
    assert len(set(prints)) == 4


def test_adapter_without_the_setting_is_refused(folder: Path) -> None:
    write_adapter(folder, (EARLY,))
    with pytest.raises(CheckpointError, match=f"{CONFIG}: the setting 'merge_adapter' is false, but .* has an adapter"):
        open_checkpoint(folder)


def test_setting_without_an_adapter_is_refused(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=f"{CONFIG}: the setting 'merge_adapter' is true, but .* has no adapter"):
        open_checkpoint(folder, merge_adapter=True)


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("peft_type", "LOHA", "'LOHA', which is not served; served is 'LORA'"),
        ("peft_type", None, "None, which is not served"),
        ("use_dora", True, "True, which is not served; served is nothing"),
        ("bias", "lora_only", "'lora_only', which is not served; served is 'none'"),
        ("lora_bias", True, "True, which is not served"),
        ("modules_to_save", ["lm_head"], r"\['lm_head'\], which is not served"),
        ("target_parameters", ["mlp.experts.gate_up_proj"], ".*, which is not served"),
        ("trainable_token_indices", [1], r"\[1\], which is not served"),
        ("layer_replication", [[0, 2]], r".*, which is not served"),
        ("fan_in_fan_out", True, "True, which is not served"),
        ("init_lora_weights", "pissa", "'pissa', which is not served; served is True or False"),
        ("something_new", {"a": 1}, r"\{'a': 1\}, which is not served"),
        ("r", 0, "0; it must be a number above 0"),
        ("r", "4", "'4'; it must be a number above 0"),
        ("lora_alpha", None, "None; it must be a number above 0"),
        ("rank_pattern", ["q_proj"], r"\['q_proj'\]; it must hold a number above 0 for each name"),
        ("alpha_pattern", {"q_proj": "8"}, r"\{'q_proj': '8'\}; it must hold a number above 0"),
    ],
)
def test_other_kinds_of_adapter_are_refused_by_key_and_value(folder: Path, key: str, value: object, text: str) -> None:
    write_adapter(folder, (EARLY,), None, **{key: value})
    with pytest.raises(CheckpointError, match=f"{CONFIG}: {key} is {text}"):
        open_checkpoint(folder, merge_adapter=True)


def test_adapter_without_safetensors_is_refused(folder: Path) -> None:
    write_adapter(folder, (EARLY,))
    (folder / WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match=f"{CONFIG}: {WEIGHTS} is not beside it"):
        open_checkpoint(folder, merge_adapter=True)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (f"base_model.model.{EARLY}.lora_magnitude_vector", "is not served; served are lora_A and lora_B"),
        (f"base_model.model.{LAYER.format(1)}.embed_tokens.lora_embedding_A", "is not served"),
        (f"base_model.model.{LAYER.format(1)}.self_attn.v_proj.lora_A.weight", "has lora_A only"),
    ],
)
def test_other_keys_are_refused(folder: Path, key: str, text: str) -> None:
    write_adapter(folder, (EARLY,))
    save_file({**load_file(folder / WEIGHTS), key: torch.ones(RANK, 64)}, folder / WEIGHTS)
    with pytest.raises(CheckpointError, match=f"{WEIGHTS}: .*{text}"):
        open_checkpoint(folder, merge_adapter=True)


@pytest.mark.parametrize("name", ["model.language_model.layers.9.self_attn.q_proj", "model.nothing", LAYER.format(1)])
def test_name_of_no_linear_layer_is_refused(folder: Path, name: str) -> None:
    write_adapter(folder, (EARLY,))
    tensors = {key.replace(EARLY, name): value for key, value in load_file(folder / WEIGHTS).items()}
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(CheckpointError, match=f"{WEIGHTS}: '{name}' is no linear layer of this model"):
        merged(folder)


def test_rank_that_contradicts_the_config_is_refused(folder: Path) -> None:
    write_adapter(folder, (EARLY,), {EARLY: 3})
    with pytest.raises(CheckpointError, match=rf"'{EARLY}' are \[3, 64\] and \[96, 3\], but {CONFIG} has the rank 4"):
        merged(folder)


def test_tied_head_is_not_merged(bf16_checkpoint: Path, tmp_path: Path) -> None:
    folder = write_adapter(Path(shutil.copytree(bf16_checkpoint, tmp_path / "tied")), (EARLY,))
    tensors = {key.replace(EARLY, HEAD): value for key, value in load_file(folder / WEIGHTS).items()}
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(CheckpointError, match="'lm_head' cannot be merged: tie_word_embeddings is True"):
        merged(folder)
