"""Granite 4 Vision: training's own forward pass is transformers' forward pass; its tiles are the image processor's."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from demo.architectures import ARCHITECTURES
from demo.architectures.granite4_tiles import CORNERS, NEWLINE, PATCHES, TILE_PX, corner_labels, cut, layout_of
from demo.architectures.granite4_vision import BORDER, LAYER_MAP, SPATIAL_LAYERS
from demo.architectures.granite4_vision_training import (
    Batch,
    as_pixels,
    collate,
    encode_pictures,
    make_fast,
    run_language,
)
from demo.batches import map_tensors
from demo.control import zeroed_copy
from demo.digits import load_split
from demo.graphed import StepRunner
from demo.learner import PROBE_WEIGHT, Probes, answer_loss
from demo.lessons import QUESTIONS_PER_PICTURE, Lesson, make_lesson
from demo.pictures import Box, choose_size
from demo.tokenizer import train_tokenizer

GRANITE = ARCHITECTURES["granite"]
SIZES = [(245, 64), (161, 139), (176, 176), (283, 121)]
PICTURES = 3
LATE = [layer for layer in SPATIAL_LAYERS if layer >= BORDER]


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    model = GRANITE.build_model(train_tokenizer(GRANITE.chat)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint folder of these weights, rounded to the stored dtype."""
    folder = tmp_path_factory.mktemp("granite")
    GRANITE.save_checkpoint(model, train_tokenizer(GRANITE.chat), folder)
    return folder


@pytest.fixture(scope="module")
def loaded(model: Any, folder: Path) -> Any:
    """transformers' own model with the same fp32 weights."""
    loading: Any = AutoModelForImageTextToText
    loaded = loading.from_pretrained(folder, dtype=torch.float32).eval()
    loaded.load_state_dict(model.state_dict())
    return loaded


def lessons(size: tuple[int, int]) -> list[Lesson]:
    random = np.random.default_rng(3)
    return [make_lesson(random, load_split().train, GRANITE.chat, size, GRANITE.jitter_px) for _ in range(PICTURES)]


def batch_of(size: tuple[int, int]) -> Batch:
    return collate(train_tokenizer(GRANITE.chat), GRANITE.chat, lessons(size), size)


def image_sizes(size: tuple[int, int], count: int) -> torch.Tensor:
    return torch.tensor([[size[1], size[0]]] * count)


@torch.no_grad()
@pytest.mark.parametrize("size", SIZES)
def test_the_features_are_transformers_own(model: Any, loaded: Any, size: tuple[int, int]) -> None:
    batch, order = batch_of(size), layout_of(*size).order
    features = encode_pictures(model, batch)
    expected = loaded.model.get_image_features(
        as_pixels(batch.tiles), image_sizes(size, PICTURES), return_dict=True
    ).deepstack_features
    assert list(features) == [layer for layer, _ in expected] == [*(layer for _, layer in LAYER_MAP), *SPATIAL_LAYERS]
    for layer, packed in expected:
        for picture, rows in zip(features[layer], packed, strict=True):
            vectors = torch.cat([picture.flatten(0, 1), model.model.image_newline[None]])
            torch.testing.assert_close(vectors[np.where(order == NEWLINE, -1, order)], rows, atol=5e-5, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("size", SIZES)
def test_the_language_model_is_transformers_own(model: Any, loaded: Any, size: tuple[int, int]) -> None:
    batch = batch_of(size)
    hidden = run_language(model, batch, encode_pictures(model, batch))
    expected = transformers_forward(loaded, batch, size)
    torch.testing.assert_close(hidden[shown(batch)], expected, atol=1e-4, rtol=0)


@torch.no_grad()
def test_zeroed_late_features_change_transformers_forward(loaded: Any) -> None:
    batch = batch_of(SIZES[0])
    normal = transformers_forward(loaded, batch, SIZES[0])
    with GRANITE.zeroed_features(loaded):
        zeroed = transformers_forward(loaded, batch, SIZES[0])
    again = transformers_forward(loaded, batch, SIZES[0])
    assert (normal - zeroed).abs().max() > 0.1
    assert torch.equal(normal, again)


@torch.no_grad()
@pytest.mark.parametrize("layer", [0, *LATE])
def test_every_level_reaches_the_last_hidden_state(model: Any, layer: int) -> None:
    batch = batch_of(SIZES[0])
    features = encode_pictures(model, batch)
    hidden = run_language(model, batch, features)
    without = run_language(model, batch, {**features, layer: torch.zeros_like(features[layer])})
    assert (without - hidden).abs().max() > 0.1


@torch.no_grad()
def test_the_dropped_pictures_lose_their_early_features_only(model: Any) -> None:
    batch, probes = batch_of(SIZES[0]), Probes(GRANITE.probed, GRANITE.width)
    kept, dropped = (batch._replace(early_kept=torch.full_like(batch.early_kept, share)) for share in (1.0, 0.0))
    one, two = (GRANITE.losses(model, probes, case) for case in (kept, dropped))
    features = encode_pictures(model, batch)
    late = {layer: level if layer in LATE else torch.zeros_like(level) for layer, level in features.items()}
    logits = model.lm_head(run_language(model, batch, late)[:, :-1]) / model.config.text_config.logits_scaling
    assert two[0] == answer_loss(logits, batch.labels)
    assert one[0] != two[0]
    assert one[1] == two[1]


@torch.no_grad()
def test_the_control_zeroes_what_crosses_the_border(folder: Path, tmp_path: Path) -> None:
    loading: Any = AutoModelForImageTextToText
    batch = batch_of(SIZES[0])
    newlines = layout_of(*SIZES[0]).order == NEWLINE
    pixels, sizes = as_pixels(batch.tiles), image_sizes(SIZES[0], PICTURES)
    normal, control = (
        dict(
            loading.from_pretrained(path, dtype=torch.float32)
            .model.get_image_features(pixels, sizes, return_dict=True)
            .deepstack_features
        )
        for path in (folder, zeroed_copy(folder, tmp_path / "control"))
    )
    for layer, pictures in control.items():
        for rows, before in zip(pictures, normal[layer], strict=True):
            if layer < BORDER:
                assert torch.equal(rows, before)
            else:
                assert not rows[~newlines].any()
                assert before[~newlines].abs().max() > 0.1
                assert torch.equal(rows[newlines], before[newlines])


@pytest.mark.parametrize("size", [*SIZES, *(choose_size(np.random.default_rng(seed)) for seed in range(20))])
def test_tiles_and_token_counts_are_the_processors(folder: Path, size: tuple[int, int]) -> None:
    loading: Any = AutoProcessor
    processor = loading.from_pretrained(folder, backend="pil")
    lesson = lessons(size)[0]
    inputs = processor(images=lesson.scene.picture, text=GRANITE.chat.prompt("<image>Read it."), return_tensors="pt")
    layout = layout_of(*size)
    tiles = torch.from_numpy(cut(lesson.scene.picture, layout))[None]
    torch.testing.assert_close(as_pixels(tiles), inputs["pixel_values"], atol=1e-6, rtol=0)
    assert int((inputs["input_ids"] == processor.image_token_id).sum()) == len(layout.order)
    assert GRANITE.token_counts(inputs) == [len(layout.order)]


@pytest.mark.parametrize("size", SIZES)
def test_corner_labels_name_every_digit_in_order(size: tuple[int, int]) -> None:
    for lesson in lessons(size):
        number = lesson.scene.truth.number
        thumbnail, *tiles = corner_labels(lesson.scene, layout_of(*size))
        for known in (thumbnail.reshape(-1, 5), np.stack(tiles).reshape(-1, 5)):
            assert set(known[:, 1].tolist()) == set(range(len(number) + 1))
            assert all(int(number[which - 1]) + 1 == digit for digit, which in known[:, :2].tolist() if which)


def test_corner_labels_lie_where_the_spatial_groups_sample() -> None:
    """One digit's box is exactly one patch: only that patch has its label."""
    size = (256, 128)
    lesson = lessons(size)[0]
    box = Box(136.0, 16.0, 8.0, 8.0)  # second tile: column 1, row 2 of its patches
    scene = replace(lesson.scene, digits=(box,), truth=replace(lesson.scene.truth, number="7"))
    labelled = np.argwhere(corner_labels(scene, layout_of(*size))[1:, :, :, 0])
    assert labelled.tolist() == [[1, 8, CORNERS.index((0, 1))]]  # cell (1, 0)


@torch.no_grad()
@pytest.mark.parametrize(("head", "step"), list(enumerate([1, -1, PATCHES, -PATCHES])))
def test_the_tower_starts_by_looking_at_neighbours(head: int, step: int) -> None:
    tower = GRANITE.build_model(train_tokenizer(GRANITE.chat)).model.vision_tower
    states = tower.embeddings(torch.full((1, 3, TILE_PX, TILE_PX), 0.6))
    block = tower.encoder.layers[0]
    attention, normed = block.self_attn, block.layer_norm1(states)
    queries, keys = (
        projection(normed).view(PATCHES**2, attention.num_heads, -1)[:, head]
        for projection in (attention.q_proj, attention.k_proj)
    )
    weights = (queries @ keys.T * attention.scale).softmax(-1)
    inner = torch.arange(PATCHES**2).view(PATCHES, PATCHES)[1:-1, 1:-1].flatten()
    assert torch.equal(weights[inner].argmax(-1), inner + step)
    assert weights[inner, inner + step].min() > 0.5


def test_a_step_leaves_gradients_for_every_weight_in_use(model: Any) -> None:
    probes = Probes(GRANITE.probed, GRANITE.width)
    named = {**dict(model.named_parameters()), **dict(probes.named_parameters())}
    run = StepRunner(
        lambda batch: GRANITE.losses(model, probes, batch), torch.tensor([1.0, PROBE_WEIGHT]), list(named.values())
    )
    assert run(batch_of(SIZES[0])).shape == (2,)
    unused = {name for name, value in named.items() if value.grad is None or not value.grad.abs().sum() > 0}
    assert unused == {f"model.vision_tower.post_layernorm.{kind}" for kind in ("weight", "bias")}


def test_a_step_reads_no_value_back(model: Any) -> None:
    """Tensors without values stand in: whatever a CUDA graph could not hold, such as a shape from data, fails."""
    batch = map_tensors(batch_of(SIZES[0]), lambda values: values.to("meta"))
    empty = copy.deepcopy(model).to("meta")
    make_fast(empty)
    losses = GRANITE.losses(empty, Probes(GRANITE.probed, GRANITE.width).to("meta"), batch)
    torch.autograd.backward(losses.sum())
    assert losses.is_meta


def shown(batch: Batch) -> list[int]:
    return [row for row in range(len(batch.token_ids)) if batch.is_picture[row].any()]


def transformers_forward(loaded: Any, batch: Batch, size: tuple[int, int]) -> torch.Tensor:
    rows = shown(batch)
    hidden: torch.Tensor = loaded.model(
        input_ids=batch.token_ids[rows],
        pixel_values=as_pixels(batch.tiles)[[row // QUESTIONS_PER_PICTURE for row in rows]],
        image_sizes=image_sizes(size, len(rows)),
        use_cache=False,
    ).last_hidden_state
    return hidden
