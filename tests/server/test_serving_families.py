"""Every family on the real server, at four stages, where features cross three borders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from deepstack_serving.embedded import ModelLoadError
from deepstack_serving.repository import model_names, stage_names, write_repository
from deepstack_serving.wire import VISION_ENCODER
from tests.support.asking import MIXED, ask_alone
from tests.support.local import LocalServer, local_settings
from tests.support.raw_client import ask, request
from tests.support.server import gated_repository, is_whole, serving
from tests.support.tiny import write_checkpoint
from tests.support.tiny_granite import write_granite_checkpoint
from tests.support.tiny_moe import TinyMoeShape

STAGES = stage_names(4)
WRITERS: dict[str, Callable[[Path], Path]] = {
    "qwen3_vl_moe": lambda folder: write_checkpoint(folder, TinyMoeShape()),
    "granite4_vision": write_granite_checkpoint,
}


@pytest.mark.parametrize("family", WRITERS)
def test_four_stages_on_the_server_answer_as_one_does_without(family: str, tmp_path: Path) -> None:
    checkpoint = WRITERS[family](tmp_path / "checkpoint")
    write_repository(tmp_path / "repository", STAGES)
    with LocalServer(local_settings(checkpoint), 1) as local:
        known = ask_alone(local, MIXED)
    models = model_names(STAGES)
    with serving(checkpoint, tmp_path / "run", tmp_path / "repository", models, split_points="1,2,4") as server:
        for question, answer in zip(MIXED, known, strict=True):
            reply = ask(server, request(question.text, question.images, logprobs=1))
            assert tuple(reply.token_ids) == answer.ids
            np.testing.assert_allclose(reply.logprobs, answer.logprobs, atol=1e-4)
        assert is_whole(server)


@pytest.mark.parametrize(
    ("model", "extra"), [("language_early", "ds_7"), ("language_late", "ds_2"), (VISION_ENCODER, "ds_5")]
)
def test_stage_that_declares_too_much_does_not_start(checkpoint: Path, tmp_path: Path, model: str, extra: str) -> None:
    """Layers 0 to 2 of six receive features, and all of them are in the first stage."""
    repository = gated_repository(tmp_path / "repository")
    with (repository / model / "config.pbtxt").open("a") as file:
        kind = "output" if model == VISION_ENCODER else "input"
        file.write(f'{kind} {{ name: "{extra}" data_type: TYPE_FP32 dims: [ -1, 64 ] }}\n')
    with (
        pytest.raises(ModelLoadError, match=f"{model} declares the {kind} {extra} FP32"),
        serving(checkpoint, tmp_path / "run", repository, (model,)),
    ):
        pass
