"""Generated repositories: one and four language stages on the real server answer as two do, images included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from deepstack_serving.embedded import EmbeddedServer
from deepstack_serving.repository import model_names, stage_names, write_repository
from tests.support.asking import ONE_IMAGE, TEXT, Answer
from tests.support.raw_client import ask, infer, request
from tests.support.server import eventually, gauges, is_whole, serving


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


def test_two_pipelines_share_the_requests(checkpoint: Path, known_answers: list[Answer], tmp_path: Path) -> None:
    """One language stage each: five models, which answer as one pipeline does; the second image goes to the second."""
    stages = stage_names(1)
    write_repository(tmp_path / "repository", stages, 2)
    models = model_names(stages, 2)
    with serving(checkpoint, tmp_path / "run", tmp_path / "repository", models) as server:
        assert eventually(lambda: gauges(server)["ready"] == 1.0)  # one that is not healthy is passed over
        image, text = known_answers
        for question, known in ((ONE_IMAGE, image), (ONE_IMAGE, image), (TEXT, text)):
            reply = ask(server, request(question.text, question.images, logprobs=1))
            assert tuple(reply.token_ids) == known.ids
            np.testing.assert_allclose(reply.logprobs, known.logprobs, atol=1e-4)
        assert is_whole(server)
        assert all(has_computed_an_image(server, name) for name in models if name.startswith("language"))


def has_computed_an_image(server: EmbeddedServer, stage: str) -> bool:
    """Whether features ever reached it; only prompts with images bring them."""
    rows = {"input_ids": np.int64, "query_lengths": np.int32, "context_lengths": np.int32, "sample_rows": np.int64}
    nothing: dict[str, npt.NDArray[Any]] = {name: np.zeros(0, dtype=kind) for name, kind in rows.items()}
    nothing |= {"position_ids": np.zeros((3, 0), dtype=np.int64)}
    info = json.loads(infer(server, stage, nothing, ["stage_info"])["stage_info"].tobytes())
    return "ds_0 cpu" in info["arrivals"]
