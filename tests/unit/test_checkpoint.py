"""Opening and loading checkpoints: what contradicts is refused before or while weights are read, and variants load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from deepstack_serving.attention import ATTENTION
from deepstack_serving.checkpoint import open_checkpoint
from deepstack_serving.errors import CheckpointError
from deepstack_serving.injection import plan_stages
from deepstack_serving.stages.loading import load_language_stage, load_vision_stage
from tests.support.tiny import TinyShape, write_checkpoint

INDEX = "model.safetensors.index.json"


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "copy"))


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def parameter_bytes(model: torch.nn.Module) -> int:
    return sum({value.data_ptr(): value.nbytes for value in model.parameters()}.values())


def load_all(folder: Path, stages: int) -> list[torch.nn.Module]:
    opened = open_checkpoint(folder)
    plans = plan_stages(opened.layer_count, stages, None, opened.deepstack_layers)
    return [load_vision_stage(opened, "cpu"), *(load_language_stage(opened, plan, "cpu", ATTENTION) for plan in plans)]


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_stages_hold_every_weight_once(checkpoint: Path, stages: int) -> None:
    stored = 0
    for file in checkpoint.glob("*.safetensors"):
        with safe_open(file, "pt") as weights:
            stored += sum(weights.get_tensor(name).nbytes for name in weights.keys())  # noqa: SIM118
    assert sum(map(parameter_bytes, load_all(checkpoint, stages))) == stored


def test_tied_head_is_the_embedding_in_the_last_stage_too(bf16_checkpoint: Path) -> None:
    _, early, late = load_all(bf16_checkpoint, 2)
    head, embedding = (
        late.get_parameter("lm_head.weight"),
        early.get_parameter("model.language_model.embed_tokens.weight"),
    )
    assert torch.equal(head, embedding)
    assert head.dtype == torch.bfloat16


def test_single_file_checkpoint_loads(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, TinyShape(layers=2, deepstack_indexes=(0,), shard_size="1GB"))
    assert not (folder / INDEX).exists()
    assert len(load_all(folder, 2)) == 3


def test_asked_dtype_overrules_the_checkpoints(checkpoint: Path) -> None:
    assert open_checkpoint(checkpoint, "bfloat16").contract.dtype == "BF16"


def test_fingerprint_tells_checkpoints_apart(checkpoint: Path, bf16_checkpoint: Path, copy: Path) -> None:
    prints = [open_checkpoint(folder).fingerprint for folder in (checkpoint, copy, bf16_checkpoint)]
    assert prints[0] == prints[1] != prints[2]


def test_adapter_in_the_folder_is_refused(copy: Path) -> None:
    (copy / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"adapter_config\.json: adapters are not served"):
        open_checkpoint(copy)


def test_missing_config_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_checkpoint(tmp_path)


def test_other_model_type_is_refused_with_the_supported_ones(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(CheckpointError, match=r"model_type 'bert' is not supported; supported: qwen3_vl"):
        open_checkpoint(tmp_path)


def test_missing_shard_is_refused_by_name(copy: Path) -> None:
    shard = sorted(copy.glob("*.safetensors"))[3]
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"names the shard '{shard.name}'"):
        open_checkpoint(copy)


def test_folder_without_weights_is_refused(copy: Path) -> None:
    (copy / INDEX).unlink()
    with pytest.raises(CheckpointError, match="only safetensors weights are served"):
        open_checkpoint(copy)


@pytest.mark.parametrize(
    ("part", "key", "value", "text"),
    [
        ("vision_config", "deepstack_visual_indexes", [1, 1, 2], r"\[1, 1, 2\]; they must be distinct"),
        ("vision_config", "deepstack_visual_indexes", [1, 2, 5], r"below the vision depth 5"),
        ("vision_config", "out_hidden_size", 32, "out_hidden_size is 32, but text_config.hidden_size is 64"),
    ],
)
def test_contradicting_config_is_refused(copy: Path, part: str, key: str, value: object, text: str) -> None:
    edit_json(copy / "config.json", lambda config: config[part].update({key: value}))
    with pytest.raises(CheckpointError, match=text):
        open_checkpoint(copy)


def test_weight_that_is_not_there_is_refused_by_name(copy: Path) -> None:
    name = "model.language_model.layers.1.mlp.up_proj.weight"
    edit_json(copy / INDEX, lambda index: index["weight_map"].pop(name))
    shard = next(file for file in copy.glob("*.safetensors") if name in tensors_of(file))
    save({key: value for key, value in tensors_of(shard).items() if key != name}, shard)
    with pytest.raises(CheckpointError, match=f"missing {name}"):
        load_all(copy, 2)


def test_weight_of_another_shape_is_refused_by_name(copy: Path) -> None:
    name = "model.language_model.norm.weight"
    shard = next(file for file in copy.glob("*.safetensors") if name in tensors_of(file))
    save({**tensors_of(shard), name: torch.ones(5)}, shard)
    with pytest.raises(CheckpointError, match="norm"):
        load_all(copy, 1)


def tensors_of(file: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(file)


def save(tensors: dict[str, torch.Tensor], file: Path) -> None:
    from safetensors.torch import save_file

    save_file(tensors, file, metadata={"format": "pt"})
