"""Granite 4 Vision by itself: tokens counted before encoding, images in order, prompts as data, refusals at load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from transformers import AutoTokenizer

from deepstack_serving.checkpoint import Checkpoint, open_checkpoint
from deepstack_serving.engine.orchestrator import GenerationDefaults
from deepstack_serving.errors import CheckpointError
from deepstack_serving.families.base import ImageProcessing
from deepstack_serving.injection import plan_stages
from deepstack_serving.media import MediaFiles
from deepstack_serving.prompt.messages import user_turn
from deepstack_serving.prompt.tokenizer import PromptTokenizer
from deepstack_serving.stages.loading import load_vision_stage
from deepstack_serving.stages.vision import VisionStage
from deepstack_serving.wire import language_interface
from tests.support.asking import picture
from tests.support.local import local_settings
from tests.support.tiny_granite import IMAGE_SIZE, write_granite_checkpoint

CONFIG, PROCESSOR, IMAGES = "config.json", "processor_config.json", "preprocessor_config.json"
SIDE = IMAGE_SIZE // 8 // 2  # patches of 8 pixels, halved
EXTREME = [(1, 1), (1, 2), (2, 1), (3, 3), (1, 3), (3, 1), (1, 5000), (5000, 1), (999, 3), (2, 999), (4000, 3000)]
AROUND_TILES = [(width, height) for width in (63, 64, 65, 128, 193) for height in (64, 127, 129)]
GENERATOR = np.random.default_rng(0)
RANDOM = [tuple(pair) for pair in GENERATOR.integers(1, 400, (40, 2)).tolist()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_granite_checkpoint(tmp_path_factory.mktemp("granite") / "fp32")


@pytest.fixture(scope="module")
def opened(folder: Path) -> Checkpoint:
    return open_checkpoint(folder)


@pytest.fixture(scope="module")
def processing(opened: Checkpoint) -> ImageProcessing:
    return opened.family.image_processing(opened.folder)


@pytest.fixture(scope="module")
def vision(opened: Checkpoint) -> nn.Module:
    return load_vision_stage(opened, "cpu")


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def blank(size: tuple[int, int]) -> Image.Image:
    return Image.new("RGB", size)


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def set_key(path: Path, key: str, value: object) -> None:
    """`key` may lead into a part of the file with a dot; None removes it."""
    part, _, name = key.rpartition(".")

    def change(content: dict[str, Any]) -> None:
        owner = content[part] if part else content
        owner.pop(name) if value is None else owner.update({name: value})

    edit_json(path, change)


def load(folder: Path) -> None:
    """As the vision stage and the orchestrator do, before any weight."""
    checkpoint = open_checkpoint(folder)
    checkpoint.family.image_processing(folder)


@torch.inference_mode()
@pytest.mark.parametrize("sizes", [EXTREME, AROUND_TILES, RANDOM], ids=["extreme", "around tiles", "random"])
def test_token_count_is_the_encoders_rows(
    opened: Checkpoint, processing: ImageProcessing, vision: nn.Module, sizes: list[tuple[int, int]]
) -> None:
    counted, encoded = {}, {}
    for size in sizes:
        features = opened.family.encode(vision, processing.prepare([blank(size)])).deepstack
        counted[size], encoded[size] = [processing.token_count(*size)] * 7, [len(rows) for rows in features.values()]
    assert counted == encoded


@pytest.mark.parametrize("size", [*EXTREME, *AROUND_TILES])
def test_grid_thumbnail_and_newlines_make_the_tokens(processing: ImageProcessing, size: tuple[int, int]) -> None:
    time, rows, columns = processing.prepare([blank(size)])["image_grid_thw"][0].tolist()
    assert SIDE**2 + time * rows * (columns + 1) == processing.token_count(*size)


def test_every_row_of_the_grid_ends_with_the_newline_vector(
    opened: Checkpoint, processing: ImageProcessing, vision: nn.Module
) -> None:
    inputs = processing.prepare([blank((100, 70))])
    _, rows, columns = inputs["image_grid_thw"][0].tolist()
    newline: torch.Tensor = vision.model.image_newline  # type: ignore[union-attr,assignment]
    for features in opened.family.encode(vision, inputs).deepstack.values():
        ends = features[SIDE**2 + columns :: columns + 1]
        assert torch.equal(ends, newline.expand(rows, -1))


@torch.inference_mode()
def test_images_of_one_call_are_packed_in_order(folder: Path) -> None:
    files = [picture(*size, seed) for seed, size in enumerate([(64, 64), (130, 66), (60, 180), (300, 20)])]
    stage = VisionStage(local_settings(folder, vision_cache_bytes=0), open_checkpoint(folder))
    together = stage.run(MediaFiles(tuple(files)), ["ds_0", "ds_6"])
    alone = [stage.run(MediaFiles((file,)), ["ds_0", "ds_6"]) for file in files]
    for name in ("ds_0", "ds_6"):
        torch.testing.assert_close(together[name], torch.cat([item[name] for item in alone]), atol=1e-5, rtol=0)
    assert together["image_tokens"].tolist() == [int(item["image_tokens"]) for item in alone]
    stage.close()


@pytest.mark.parametrize("size", [(1, 1), (3, 1), (1, 3), (3, 3)])
def test_sides_that_look_like_channels_keep_the_colours(processing: ImageProcessing, size: tuple[int, int]) -> None:
    pixels = processing.prepare([Image.new("RGB", size, (255, 0, 0))])["pixel_values"][0, 0]
    assert [channel.unique().tolist() for channel in pixels] == [[1.0], [-1.0], [-1.0]]


def test_hub_layout_of_the_tower_loads(copy: Path, vision: nn.Module) -> None:
    """The hub keeps the tower's weights one level deeper than transformers writes them."""
    from safetensors.torch import load_file, save_file

    weights = {name: tensor for file in copy.glob("*.safetensors") for name, tensor in load_file(file).items()}
    for file in (*copy.glob("*.safetensors"), copy / "model.safetensors.index.json"):
        file.unlink()
    old, new = "model.vision_tower.", "model.vision_tower.vision_model."
    save_file({name.replace(old, new): tensor for name, tensor in weights.items()}, copy / "model.safetensors")
    loaded = load_vision_stage(open_checkpoint(copy), "cpu").state_dict()
    assert {name: torch.equal(loaded[name], tensor) for name, tensor in vision.state_dict().items()} == dict.fromkeys(
        loaded, True
    )


@pytest.mark.parametrize("border", range(9))
def test_features_of_later_layers_cross_the_border_and_no_others(opened: Checkpoint, border: int) -> None:
    early, late = plan_stages(opened.layer_count, 2, [border], opened.deepstack_layers)
    sent = [spec.name for spec in language_interface(opened.contract, early).outputs]
    received = [spec.name for spec in language_interface(opened.contract, late).inputs]
    crossing = [f"ds_{layer}" for layer in range(7) if layer >= border]
    rows = ["image_rows", "feature_rows"] if crossing else []
    assert [name for name in sent if name.startswith("ds_")] == crossing
    assert [name for name in received if name.startswith(("ds_", "image_", "feature_"))] == [*rows, *crossing]


def test_stop_tokens_are_those_of_the_generation_config(opened: Checkpoint) -> None:
    end = AutoTokenizer.from_pretrained(opened.folder).convert_tokens_to_ids("<|end_of_text|>")
    assert GenerationDefaults(opened).eos_token_ids == (end,)


@pytest.mark.parametrize("special", [True, False], ids=["special", "not marked special"])
@pytest.mark.parametrize("text", ["<image>", "a<image>b", "<image><image>", "<|end_of_text|>"])
def test_what_a_user_types_is_no_placeholder(copy: Path, special: bool, text: str) -> None:
    def mark(content: dict[str, Any]) -> None:
        for token in content["added_tokens"]:
            token["special"] = special if token["content"] == "<image>" else token["special"]

    edit_json(copy / "tokenizer.json", mark)
    checkpoint = open_checkpoint(copy)
    placeholder = checkpoint.family.image_token_id(checkpoint.config)
    tokenizer = PromptTokenizer(copy, (placeholder,))
    ids, ends = tokenizer.encode_chat(user_turn(text, 1)), tokenizer.encode_raw("<|end_of_text|>")
    assert (ids.count(placeholder), ids.count(ends[0])) == (1, 1)
    rendered = tokenizer.tokenizer.apply_chat_template(user_turn(text, 1), tokenize=False, add_generation_prompt=True)
    assert tokenizer.tokenizer.decode(ids) == rendered


@pytest.mark.parametrize(
    ("file", "key", "value", "text"),
    [
        (CONFIG, "deepstack_layer_map", [[-4, 2], [-2, 2], [-1, 0]], r"decoder layers \[2\] twice"),
        (CONFIG, "deepstack_layer_map", [[-4, 3], [-2, 1], [-1, 0]], r"decoder layers \[3\] twice"),
        (CONFIG, "spatial_target_layers", [3, 4, 5, 8], r"decoder layers \[8\] .* beyond the 8 of text_config"),
        (CONFIG, "spatial_target_layers", [3, 4, 5, 6, 7], r"spatial_target_layers is .* there are 4"),
        (CONFIG, "deepstack_layer_map", [[-7, 2]], r"vision layers \[-7, -1\], but .*num_hidden_layers is 5"),
        (CONFIG, "spatial_vision_layer", 6, r"vision layers .*6\], but .*num_hidden_layers is 5"),
        (CONFIG, "deepstack_layer_map", None, "deepstack_layer_map or downsample_rate is missing"),
        (CONFIG, "downsample_rate", "half", "downsample_rate is 'half', but vision_config gives 8x8"),
        (CONFIG, "downsample_rate", "1/4", "downsample_rate is '1/4', but vision_config gives 8x8"),
        (CONFIG, "downsample_rate", "8/16", "downsample_rate is '8/16', but vision_config gives 8x8"),
        (CONFIG, "image_grid_pinpoints", [[64, 96]], r"image_grid_pinpoints has \[\[64, 96\]\].*image_size 64"),
        (CONFIG, "vision_feature_select_strategy", "default", "vision_feature_select_strategy is 'default'"),
        (CONFIG, "vision_config.model_type", "clip_vision_model", "model_type is 'clip_vision_model'"),
        (CONFIG, "use_spatial_sampling", False, "use_spatial_sampling is False"),
        (CONFIG, "deepstack_layer_map", [5], r"deepstack_layer_map is \[5\]; it must be a list of pairs"),
        (CONFIG, "image_grid_pinpoints", [[64, "x"]], r"image_grid_pinpoints is \[\[64, 'x'\]\]; it must be a list"),
        (CONFIG, "spatial_target_layers", ["a"], r"spatial_target_layers is \['a'\]; it must be a list of whole"),
        (
            CONFIG,
            "vision_config.image_size",
            [64, 64],
            r"image_size is [\[(]64, 64.*patch_size is 8; they must be whole",
        ),
        (CONFIG, "vision_config.patch_size", 0, "image_size is 64 and vision_config.patch_size is 0; they must be"),
        (PROCESSOR, "patch_size", 16, "patch_size is 16, but config.json has vision_config.patch_size 8"),
        (PROCESSOR, "downsample_rate", "1/4", "downsample_rate is '1/4', but config.json has downsample_rate '4/8'"),
        (PROCESSOR, "downsample_rate", None, "downsample_rate is None, but config.json has downsample_rate '4/8'"),
        (PROCESSOR, "downsample_rate", "1/2x", "downsample_rate is '1/2x', but config.json has downsample_rate '4/8'"),
        (PROCESSOR, "vision_feature_select_strategy", "default", "is 'default', but config.json has .* 'full'"),
        (PROCESSOR, "num_additional_image_tokens", 1, "num_additional_image_tokens is 1, but .*has 0"),
        (PROCESSOR, "image_token", "<|pad|>", r"image_token is \d+, but config.json has image_token_id \d+"),
        (IMAGES, "image_grid_pinpoints", [[64, 64]], r"image_grid_pinpoints is \[\[64, 64\]\], but config.json has"),
        (IMAGES, "size", {"height": 32, "width": 32}, r"size is \[32, 32\], but config.json has .*image_size 64"),
        (IMAGES, "crop_size", {"height": 32, "width": 32}, r"crop_size is \[32, 32\], but config.json has"),
    ],
)
def test_contradiction_is_refused_with_file_key_and_values(
    copy: Path, file: str, key: str, value: object, text: str
) -> None:
    set_key(copy / file, key, value)
    with pytest.raises(CheckpointError, match=f"{file}: .*{text}"):
        load(copy)


def test_processor_file_that_nests_the_image_processor_is_named(copy: Path) -> None:
    images = json.loads((copy / IMAGES).read_text())
    (copy / IMAGES).unlink()
    set_key(copy / PROCESSOR, "image_processor", {**images, "size": {"height": 32, "width": 32}})
    with pytest.raises(CheckpointError, match=f"{PROCESSOR}: size is"):
        load(copy)


def test_missing_processor_is_refused(copy: Path) -> None:
    (copy / IMAGES).unlink()
    with pytest.raises(CheckpointError, match=f"{copy}: the processor cannot be read"):
        load(copy)


def test_adapter_is_refused_unless_it_is_to_be_merged(copy: Path) -> None:
    (copy / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="the setting 'merge_adapter' is false"):
        load(copy)
