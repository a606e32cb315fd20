"""Qwen3-VL: training's own forward pass is transformers' forward pass; its inputs are the image processor's."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from demo.architectures import ARCHITECTURES
from demo.architectures.qwen3_vl_training import (
    Batch,
    as_frames,
    collate,
    encode_pictures,
    run_language,
    to_patches,
    training_loss,
)
from demo.batches import TrainingBatches
from demo.digits import load_split
from demo.evaluate import OfflineReader, held_out_cases
from demo.graphed import StepRunner
from demo.labels import LABEL_COUNTS
from demo.learner import Probes
from demo.lessons import IGNORED, QUESTIONS_PER_PICTURE, Lesson, make_lesson
from demo.questions import Kind
from demo.tokenizer import token_id, train_tokenizer

QWEN = ARCHITECTURES["qwen"]
SIZE = (240, 64)
PICTURES = 4


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    return QWEN.build_model(train_tokenizer(QWEN.chat)).eval()


@pytest.fixture(scope="module")
def batch() -> Batch:
    return collate(train_tokenizer(QWEN.chat), QWEN.chat, lessons(), SIZE)


def lessons() -> list[Lesson]:
    random = np.random.default_rng(3)
    return [make_lesson(random, load_split().train, QWEN.chat, SIZE, QWEN.jitter_px) for _ in range(PICTURES)]


def grids(count: int) -> torch.Tensor:
    return torch.tensor([[1, SIZE[1] // 8, SIZE[0] // 8]] * count)


@torch.no_grad()
def test_the_vision_tower_is_transformers_own(model: Any, batch: Batch) -> None:
    main, deepstack = encode_pictures(model.model.visual, batch)
    expected = model.model.visual(as_frames(batch.patches), grid_thw=grids(PICTURES))
    torch.testing.assert_close(main.flatten(0, 1), expected.pooler_output, atol=2e-5, rtol=0)
    for level, reference in zip(deepstack, expected.deepstack_features, strict=True):
        torch.testing.assert_close(level.flatten(0, 1), reference, atol=2e-5, rtol=0)


@torch.no_grad()
def test_the_language_model_is_transformers_own(model: Any, batch: Batch) -> None:
    hidden = run_language(model, batch, *encode_pictures(model.model.visual, batch))
    shown = [row for row in range(len(batch.token_ids)) if batch.is_picture[row].any()]
    frames = as_frames(batch.patches).view(PICTURES, -1, 384)
    expected = model.model(
        input_ids=batch.token_ids[shown],
        position_ids=batch.positions[:, shown],
        pixel_values=frames[[row // QUESTIONS_PER_PICTURE for row in shown]].flatten(0, 1),
        image_grid_thw=grids(len(shown)),
        use_cache=False,
    ).last_hidden_state
    torch.testing.assert_close(hidden[shown], expected, atol=5e-5, rtol=0)


def test_positions_are_the_models_own(model: Any, batch: Batch) -> None:
    image = token_id(train_tokenizer(QWEN.chat), "<|image_pad|>")
    shown = [row for row in range(len(batch.token_ids)) if batch.is_picture[row].any()]
    ids = batch.token_ids[shown]
    kinds = (ids == image).int()
    expected, _ = model.model.get_rope_index(ids, image_grid_thw=grids(len(shown)), mm_token_type_ids=kinds)
    assert torch.equal(batch.positions[:, shown], expected)


def test_patches_are_the_image_processors() -> None:
    case = next(held_out_cases(1, [Kind.READ]))
    prepared = OfflineReader(QWEN.checkpoint).prepare([case])
    rows, columns = prepared["image_grid_thw"][0, 1:].tolist()
    picture = Image.open(io.BytesIO(case.image_png))
    patches = torch.from_numpy(to_patches(picture, (columns * 8, rows * 8)))
    torch.testing.assert_close(as_frames(patches[None]), prepared["pixel_values"], atol=1e-6, rtol=0)


def test_a_batch_depends_on_its_number_alone() -> None:
    batches = TrainingBatches(QWEN, load_split().train, train_tokenizer(QWEN.chat).to_str(), 2, 2, 9, seed=1)
    later = batches[5]
    assert all(torch.equal(one, two) for one, two in zip(later, batches[5], strict=True))
    assert later[0].shape != batches[6][0].shape or not torch.equal(later[0], batches[6][0])


def test_a_resumed_run_goes_on_with_the_next_batch() -> None:
    source = (QWEN, load_split().train, train_tokenizer(QWEN.chat).to_str(), 2, 2, 9)
    whole, rest = TrainingBatches(*source, seed=1), TrainingBatches(*source, seed=1, first=3)
    assert all(torch.equal(one, two) for one, two in zip(whole[5], rest[2], strict=True))


def test_cell_labels_name_every_digit_in_order(batch: Batch) -> None:
    for lesson, labels in zip(lessons(), batch.cell_labels, strict=True):
        number = lesson.scene.truth.number
        assert set(labels[:, 1].tolist()) == set(range(len(number) + 1))
        assert all(int(number[which - 1]) + 1 == digit for digit, which in labels[:, :2].tolist() if which)


def test_only_answers_are_learned(batch: Batch) -> None:
    tokenizer = train_tokenizer(QWEN.chat)
    for labels in batch.labels:
        text = tokenizer.decode(labels[labels != IGNORED].tolist(), skip_special_tokens=False)
        assert text.startswith(("The ", "I see", "Hello"))
        assert text.endswith("<|im_end|>")


def test_a_step_leaves_gradients_for_every_weight(model: Any, batch: Batch) -> None:
    probes = Probes(3, 192)
    parameters = [*model.parameters(), *probes.parameters()]
    run = StepRunner(lambda values: training_loss(model, probes, values), torch.tensor([1.0, 0.5]), parameters)
    losses = run(batch)
    assert losses.shape == (2,)
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in parameters)
    assert sum(LABEL_COUNTS) == probes.layers[0].out_features
