"""The committed checkpoint: small, complete, loadable by plain transformers, and right about held-out pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText, GenerationConfig

from demo.architectures import ARCHITECTURES
from demo.evaluate import Case, OfflineReader, held_out_cases, score
from demo.examples import EXAMPLES, FOLDER, write_examples
from demo.questions import Kind

CHECKPOINT = ARCHITECTURES["qwen"].checkpoint
LIMIT_BYTES = 12 * 1024 * 1024


@pytest.fixture(scope="module")
def reader() -> OfflineReader:
    return OfflineReader(CHECKPOINT, dtype=torch.float32)


def example_cases(name: str) -> list[Case]:
    known = json.loads((FOLDER / "truth.json").read_text())[name]
    encoded = (FOLDER / name).read_bytes()
    first = next(held_out_cases(1))
    return [Case(encoded, asked["question"], asked["answer"], Kind.READ, first.truth) for asked in known["questions"]]


def test_the_folder_is_at_most_12_megabytes() -> None:
    assert sum(path.stat().st_size for path in CHECKPOINT.iterdir()) <= LIMIT_BYTES


def test_plain_transformers_loads_every_weight() -> None:
    loaded: Any = AutoModelForImageTextToText
    model, report = loaded.from_pretrained(CHECKPOINT, output_loading_info=True)
    assert not any(report.values())
    assert type(model).__name__ == "Qwen3VLForConditionalGeneration"


def test_three_deepstack_levels_are_followed_by_more_layers() -> None:
    config: Any = AutoConfig.from_pretrained(CHECKPOINT)
    assert len(config.vision_config.deepstack_visual_indexes) == 3
    assert config.text_config.num_hidden_layers == 6


def test_generation_is_greedy_and_ends_with_the_turn() -> None:
    generation: Any = GenerationConfig.from_pretrained(CHECKPOINT)
    tokens = json.loads((CHECKPOINT / "tokenizer.json").read_text())["added_tokens"]
    ends = [token["id"] for token in tokens if token["content"] in ("<|im_end|>", "<|endoftext|>")]
    assert generation.do_sample is False
    assert sorted(generation.eos_token_id) == sorted(ends)


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


def test_the_recorded_figures_meet_the_targets() -> None:
    figures = json.loads((CHECKPOINT / "training.json").read_text())["held_out"]
    assert figures["pictures"] >= 500
    assert figures["bfloat16"]["read"] >= 0.95
    assert figures["bfloat16"]["place"] >= 0.98
    assert figures["bfloat16_zeroed_deepstack"]["read"] <= figures["bfloat16"]["read"] - 0.3
