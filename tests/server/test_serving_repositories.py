"""Generated repositories: one and four language stages on the real server answer as two do, images included."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from deepstack_serving.repository import model_names, stage_names, write_repository
from tests.support.asking import ONE_IMAGE, TEXT, Answer
from tests.support.raw_client import ask, request
from tests.support.server import is_whole, serving


@pytest.mark.parametrize(("count", "split"), [(1, ""), (4, "0,1,3")])
def test_any_number_of_stages_gives_the_same_answers(
    checkpoint: Path, known_answers: list[Answer], tmp_path: Path, count: int, split: str
) -> None:
    stages = stage_names(count)
    write_repository(tmp_path / "repository", stages)
    models = model_names(stages)
    with serving(checkpoint, tmp_path / "run", tmp_path / "repository", models, split_points=split) as server:
        for question, known in zip((ONE_IMAGE, TEXT), known_answers, strict=True):
            reply = ask(server, request(question.text, question.images, logprobs=1))
            assert tuple(reply.token_ids) == known.ids
            np.testing.assert_allclose(reply.logprobs, known.logprobs, atol=1e-4)
        assert is_whole(server)
