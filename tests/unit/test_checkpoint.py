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
from deepstack_serving.errors import CheckpointError, SettingsError
from deepstack_serving.families import FAMILIES, UNSERVED
from deepstack_serving.injection import plan_stages
from deepstack_serving.stages.loading import load_language_stage, load_vision_stage
from tests.support.tiny import TinyShape, write_checkpoint

CONFIG, IMAGES, VISION, TEXT = "config.json", "preprocessor_config.json", "vision_config", "text_config"
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


def test_missing_config_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("model_type", "text"),
    [
        ("bert", "'bert' is not supported; supported: qwen3_vl, "),
        (None, "None is not supported; supported: qwen3_vl, "),
        ("cohere_compass", r"'cohere_compass' is known, but not served \(its layers .*\); supported: qwen3_vl, "),
        ("granite_docling", r"'granite_docling' is known, but not served \(its prompts "),
        ("qwen3_omni_moe", r"'qwen3_omni_moe' is known, but not served \(it speaks "),
        ("qwen3_omni_moe_thinker", r"'qwen3_omni_moe_thinker' is known, but not served \(it listens "),
    ],
)
def test_other_model_type_is_refused_with_the_supported_ones(tmp_path: Path, model_type: str | None, text: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(CheckpointError, match=f"model_type {text}"):
        open_checkpoint(tmp_path)


def test_no_family_is_both_served_and_refused() -> None:
    assert FAMILIES.keys() & UNSERVED.keys() == set()


@pytest.mark.parametrize("name", ["config.json", INDEX])
@pytest.mark.parametrize(
    ("content", "text"), [("{", "it cannot be read"), ("[1]", r"it must hold an object, not \[1\]")]
)
def test_broken_json_is_refused_by_name(copy: Path, name: str, content: str, text: str) -> None:
    (copy / name).write_text(content)
    with pytest.raises(CheckpointError, match=f"{name}: {text}"):
        open_checkpoint(copy)


@pytest.mark.parametrize("content", ["{}", '{"weight_map": {}}', '{"weight_map": ["a"]}'])
def test_index_without_shards_is_refused(copy: Path, content: str) -> None:
    (copy / INDEX).write_text(content)
    with pytest.raises(CheckpointError, match=rf"{INDEX}: weight_map is .*; it must name the shard of each weight"):
        open_checkpoint(copy)


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
        (VISION, "deepstack_visual_indexes", [1, 1, 2], r"\[1, 1, 2\]; they must be distinct"),
        (VISION, "deepstack_visual_indexes", [1, 2, 5], r"\[1, 2, 5\]; .* below the depth of vision_config, 5"),
        (VISION, "deepstack_visual_indexes", [-1], r"\[-1\]; .* below the depth of vision_config, 5"),
        (VISION, "out_hidden_size", 32, "out_hidden_size is 32, but text_config.hidden_size is 64"),
        (TEXT, "num_hidden_layers", 2, r"\[1, 2, 4\], one for .*, but text_config.num_hidden_layers is 2"),
        # Values of a wrong type, which transformers itself would meet with errors of other kinds.
        (TEXT, "hidden_size", "64", "'hidden_size'.*(?s:.*)'64'"),
        (TEXT, "num_hidden_layers", 2.5, "'num_hidden_layers'.*(?s:.*)2.5"),
        (VISION, "deepstack_visual_indexes", "1,2", "'deepstack_visual_indexes'.*(?s:.*)'1,2'"),
        (VISION, "depth", None, "'depth'.*(?s:.*)None"),
        ("", "image_token_id", [5], r"'image_token_id'.*(?s:.*)\[5\]"),
        ("", "text_config", [], "text_config"),
        ("", "vision_config", 5, "vision_config"),
        ("", "quantization_config", {"quant_method": "fp8"}, r"quantization_config is \{'quant_method': 'fp8'\}"),
    ],
)
def test_contradicting_config_is_refused(copy: Path, part: str, key: str, value: object, text: str) -> None:
    edit_json(copy / CONFIG, lambda config: (config[part] if part else config).update({key: value}))
    with pytest.raises(CheckpointError, match=rf"config\.json: .*{text}"):
        open_checkpoint(copy)


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("patch_size", 14, "vision_config.patch_size 16"),
        ("temporal_patch_size", 1, "vision_config.temporal_patch_size 2"),
        ("merge_size", 4, "vision_config.spatial_merge_size 2"),
    ],
)
def test_processor_that_contradicts_the_model_is_refused(copy: Path, key: str, value: int, text: str) -> None:
    edit_json(copy / IMAGES, lambda values: values.update({key: value}))
    with pytest.raises(CheckpointError, match=f"{IMAGES}: {key} is {value}, but config.json has {text}"):
        open_checkpoint(copy).family.image_processing(copy)


def test_config_that_no_model_can_be_built_from_is_refused(copy: Path) -> None:
    edit_json(copy / CONFIG, lambda config: config[TEXT]["rope_parameters"].update(rope_type="curled"))
    with pytest.raises(CheckpointError, match=f"{copy}: transformers cannot build the model: .*curled"):
        load_all(copy, 1)


def test_missing_image_processor_is_refused(copy: Path) -> None:
    (copy / IMAGES).unlink()
    with pytest.raises(CheckpointError, match=f"{copy}: the image processor cannot be read"):
        open_checkpoint(copy).family.image_processing(copy)


@pytest.mark.parametrize("points", ["7", "2,7"])
def test_split_beyond_the_layers_is_refused(checkpoint: Path, points: str) -> None:
    opened, split = open_checkpoint(checkpoint), [int(point) for point in points.split(",")]
    with pytest.raises(SettingsError, match=r"'split_points' is .*7\], but the checkpoint has 6 layers"):
        plan_stages(opened.layer_count, len(split) + 1, split, opened.deepstack_layers)


@pytest.mark.parametrize("size", [0, 100, 4096])
def test_damaged_shard_is_refused_by_name(copy: Path, size: int) -> None:
    shard = sorted(copy.glob("*.safetensors"))[3]
    shard.write_bytes(shard.read_bytes()[:size])
    with pytest.raises(CheckpointError, match=f"{shard.name}: it cannot be read"):
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
