"""The prompts and answers are those of transformers' processor and unsplit model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from deepstack_serving.checkpoint import open_checkpoint
from deepstack_serving.engine.intake import Intake
from deepstack_serving.engine.request import parse_request
from deepstack_serving.engine.sampling_parameters import SamplingParameters
from deepstack_serving.media import MediaFiles
from deepstack_serving.prompt.placeholders import Prompt
from deepstack_serving.prompt.tokenizer import PromptTokenizer
from deepstack_serving.stages.vision import VisionStage
from tests.support.asking import MIXED, Answer, Ask, ask_alone, picture
from tests.support.local import LocalServer, local_settings
from tests.support.reference import Reference
from tests.support.runs import Run, run, run_staggered

TOLERANCE = 1e-4
MANY_SHAPES = Ask("shapes", tuple(picture(*size, seed) for seed, size in enumerate([(33, 64), (97, 31), (40, 40)])))


def assert_close(answers: list[Answer], expected: list[Answer]) -> None:
    assert [item.ids for item in answers] == [item.ids for item in expected]
    assert max(mine.distance(theirs) for mine, theirs in zip(answers, expected, strict=True)) < TOLERANCE


def prepare(checkpoint: Path, ask: Ask) -> Prompt:
    settings, opened = local_settings(checkpoint), open_checkpoint(checkpoint)
    request = parse_request(ask.inputs, {}, SamplingParameters())
    return Intake(settings, opened, PromptTokenizer(checkpoint)).prepare(request)[0]


@pytest.mark.parametrize("ask", [*MIXED, MANY_SHAPES], ids=lambda ask: ask.text)
def test_prompt_ids_are_those_of_the_processor(checkpoint: Path, reference: Reference, ask: Ask) -> None:
    assert prepare(checkpoint, ask).input_ids.tolist() == reference.prompt(ask).input_ids.tolist()


@pytest.mark.parametrize("ask", [*MIXED, MANY_SHAPES], ids=lambda ask: ask.text)
def test_positions_are_those_of_the_model(checkpoint: Path, reference: Reference, ask: Ask) -> None:
    opened, expected = open_checkpoint(checkpoint), reference.prompt(ask)
    sizes = VisionStage(local_settings(checkpoint), opened).run(MediaFiles(ask.images), ["image_grid_thw"])
    grid = sizes["image_grid_thw"].numpy()
    positions = opened.family.positions(opened.config, prepare(checkpoint, ask).input_ids, grid)
    assert (positions.prompt.tolist(), positions.delta) == (expected.positions.tolist(), expected.delta)


def test_one_stage_equals_generate(unsplit: Run, expected: list[Answer]) -> None:
    assert_close(unsplit.together, expected)


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("budget", [7, 17, 4096])
def test_two_stages_equal_generate(checkpoint: Path, expected: list[Answer], block_size: int, budget: int) -> None:
    answers = run(checkpoint, block_size=block_size, prefill_token_budget=budget)
    assert_close(answers.together + answers.alone, expected * 2)


@pytest.mark.parametrize("budget", [1, 2])
def test_smallest_chunks_equal_generate(checkpoint: Path, expected: list[Answer], budget: int) -> None:
    answers = run(checkpoint, prefill_token_budget=budget)
    assert_close(answers.together + answers.alone, expected * 2)


def test_one_image_twice_equals_generate(checkpoint: Path, reference: Reference) -> None:
    ask = Ask("the same?", (picture(64, 96, 5), picture(96, 64, 6), picture(64, 96, 5)))
    with LocalServer(local_settings(checkpoint)) as server:
        assert_close(ask_alone(server, [ask, ask]), [reference.generate(ask)] * 2)


@pytest.mark.parametrize("every", [1, 3])
def test_staggered_arrivals_equal_generate(checkpoint: Path, expected: list[Answer], every: int) -> None:
    order = [2, 0, 1, 1, 2]
    answers = run_staggered(checkpoint, [MIXED[place] for place in order], every=every)
    assert_close(answers, [expected[place] for place in order])


def test_tied_bfloat16_config_is_what_transformers_reads(bf16_checkpoint: Path) -> None:
    opened = open_checkpoint(bf16_checkpoint)
    assert (opened.dtype, json.loads((bf16_checkpoint / "config.json").read_text())["tie_word_embeddings"]) == (
        torch.bfloat16,
        True,
    )
