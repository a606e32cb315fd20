"""The number type of a checkpoint whose config states it for the language model only, as the hub's files often do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from deepstack_serving.checkpoint import open_checkpoint
from deepstack_serving.stages.loading import load_vision_stage


def with_dtypes(source: Path, target: Path, whole: str | None, text: str | None) -> Path:
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    config.update(dtype=whole)
    config["text_config"].update(dtype=text)
    config["vision_config"].pop("dtype", None)
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.mark.parametrize(
    ("whole", "text", "served"),
    [
        (None, "bfloat16", torch.bfloat16),
        ("bfloat16", None, torch.bfloat16),
        ("float16", "bfloat16", torch.float16),
        (None, None, torch.float32),
    ],
)
def test_dtype_is_the_one_that_the_config_states(
    bf16_checkpoint: Path, tmp_path: Path, whole: str | None, text: str | None, served: torch.dtype
) -> None:
    opened = open_checkpoint(with_dtypes(bf16_checkpoint, tmp_path / "copy", whole, text))
    assert opened.dtype == served
    assert {value.dtype for value in load_vision_stage(opened, "cpu").parameters()} == {served}
