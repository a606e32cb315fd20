"""The committed checkpoints: small, complete, loadable by plain transformers, and right about held-out pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText, GenerationConfig

from deepstack_serving.checkpoint import open_checkpoint
from demo.architectures import ARCHITECTURES
from demo.architectures.base import Architecture
from demo.evaluate import Case, OfflineReader, held_out_cases, score
from demo.examples import EXAMPLES, FOLDER, write_examples
from demo.questions import Kind

LIMIT_BYTES = 12 * 1024 * 1024
READ_AT_LEAST = {"qwen": 0.95, "granite": 0.90}


@pytest.fixture(scope="module", params=ARCHITECTURES)
def architecture(request: pytest.FixtureRequest) -> Architecture:
    return ARCHITECTURES[request.param]


@pytest.fixture(scope="module")
def reader(architecture: Architecture) -> OfflineReader:
    return OfflineReader(architecture.checkpoint, dtype=torch.float32)


def example_cases(name: str) -> list[Case]:
    known = json.loads((FOLDER / "truth.json").read_text())[name]
    encoded = (FOLDER / name).read_bytes()
    first = next(held_out_cases(1))
    return [Case(encoded, asked["question"], asked["answer"], Kind.READ, first.truth) for asked in known["questions"]]


def test_the_folder_is_at_most_12_megabytes(architecture: Architecture) -> None:
    assert sum(path.stat().st_size for path in architecture.checkpoint.iterdir()) <= LIMIT_BYTES


def test_plain_transformers_loads_every_weight(architecture: Architecture) -> None:
    loaded: Any = AutoModelForImageTextToText
    model, report = loaded.from_pretrained(architecture.checkpoint, output_loading_info=True)
    assert not any(report.values())
    assert model.config.model_type == architecture.model_type


def test_deepstack_levels_are_followed_by_more_layers(architecture: Architecture) -> None:
    """Granite's last four levels cross the border of the default split."""
    checkpoint = open_checkpoint(architecture.checkpoint)
    levels = {"qwen": ((0, 1, 2), 6), "granite": ((0, 2, 4, 5, 6, 7), 8)}
    assert (tuple(sorted(checkpoint.deepstack_layers)), checkpoint.layer_count) == levels[architecture.family]


def test_generation_is_greedy_and_ends_with_the_turn(architecture: Architecture) -> None:
    generation: Any = GenerationConfig.from_pretrained(architecture.checkpoint)
    tokens = json.loads((architecture.checkpoint / "tokenizer.json").read_text())["added_tokens"]
    ends = [token["id"] for token in tokens if token["content"] in architecture.end_tokens]
    found = generation.eos_token_id if isinstance(generation.eos_token_id, list) else [generation.eos_token_id]
    assert generation.do_sample is False
    assert sorted(found) == sorted(ends)


def test_held_out_pictures_are_answered(reader: OfflineReader) -> None:
    cases = list(held_out_cases(6, [Kind.READ, Kind.PLACE]))
    figures = score(cases, reader.answer(cases))
    assert figures["read"] >= 5 / 6
    assert figures["place"] == 1.0


def test_without_deepstack_no_number_is_read(reader: OfflineReader) -> None:
    cases = list(held_out_cases(6, [Kind.READ]))
    with reader.architecture.zeroed_features(reader.model):
        figures = score(cases, reader.answer(cases))
    assert figures["read"] <= 1 / 6


@pytest.mark.parametrize("name", [name for name, _, _ in EXAMPLES])
def test_example_pictures_are_answered(reader: OfflineReader, name: str) -> None:
    cases = example_cases(name)
    assert reader.answer(cases) == [case.answer for case in cases]


def test_example_pictures_are_what_the_code_draws(tmp_path: Path) -> None:
    write_examples(tmp_path)
    assert (tmp_path / "truth.json").read_text() == (FOLDER / "truth.json").read_text()


def test_the_recorded_figures_meet_the_targets(architecture: Architecture) -> None:
    figures = json.loads((architecture.checkpoint / "training.json").read_text())["held_out"]
    assert figures["pictures"] >= 500
    assert figures["bfloat16"]["read"] >= READ_AT_LEAST[architecture.family]
    assert figures["bfloat16"]["place"] >= 0.98
    assert figures["bfloat16_zeroed_deepstack"]["read"] <= figures["bfloat16"]["read"] - 0.3
