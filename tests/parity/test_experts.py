"""Experts in some of the decoder layers only: which layers have them, and what they add, survives every split."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepstack_serving.checkpoint import open_checkpoint
from deepstack_serving.errors import CheckpointError
from tests.support.asking import MIXED
from tests.support.layouts import edit_config
from tests.support.reference import Reference
from tests.support.runs import run
from tests.support.tiny import write_checkpoint
from tests.support.tiny_moe import TinyMoeShape

SHAPES = {
    "every second layer": TinyMoeShape(layers=4, sparse_step=2, dense_layers=()),
    "one of four experts between dense layers": TinyMoeShape(
        layers=4, experts=4, experts_per_token=1, dense_layers=(0, 3)
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_some_layers_with_experts_equal_generate_at_every_split(tmp_path: Path, name: str) -> None:
    folder = write_checkpoint(tmp_path / "moe", SHAPES[name])
    unsplit, reference = run(folder, stages=1), Reference(folder)
    expected = [reference.generate(ask) for ask in MIXED]
    assert [item.ids for item in unsplit.alone] == [item.ids for item in expected]
    assert max(mine.distance(other) for mine, other in zip(unsplit.alone, expected, strict=True)) < 1e-4
    assert [point for point in range(5) if run(folder, split_points=str(point)) != unsplit] == []


def test_fewer_experts_for_each_row_answer_otherwise(tmp_path: Path) -> None:
    """The control arm: what the second expert adds is not lost in rounding."""
    folder = write_checkpoint(tmp_path / "moe", TinyMoeShape(layers=4))
    both = run(folder)
    edit_config(folder, lambda config: config["text_config"].update(num_experts_per_tok=1))
    assert min(mine.top_distance(other) for mine, other in zip(run(folder).alone, both.alone, strict=True)) > 0.1


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        (TinyMoeShape(expert_width=64), "moe_intermediate_size is 64 and text_config.hidden_size is 64: with moe_"),
        (TinyMoeShape(expert_width=32), "moe_intermediate_size is 32 and text_config.hidden_size is 64: with 2 * moe_"),
    ],
)
def test_widths_that_hide_a_transposed_expert_are_refused(tmp_path: Path, shape: TinyMoeShape, text: str) -> None:
    with pytest.raises(CheckpointError, match=rf"config.json: text_config.{text.replace('*', '.')}"):
        open_checkpoint(write_checkpoint(tmp_path / "moe", shape))


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("num_experts_per_tok", 0, "0, but text_config.num_experts is 8"),
        ("num_experts_per_tok", 9, "9, but text_config.num_experts is 8"),
        ("decoder_sparse_step", 0, "0; it must be 1 or more"),
    ],
)
def test_numbers_that_contradict_are_refused(tmp_path: Path, key: str, value: int, text: str) -> None:
    folder = write_checkpoint(tmp_path / "moe", TinyMoeShape(layers=3))
    edit_config(folder, lambda config: config["text_config"].update({key: value}))
    with pytest.raises(CheckpointError, match=f"config.json: text_config.{key} is {text}"):
        open_checkpoint(folder)
