"""Both demo checkpoints on the real server: they read pictures, and by the features that cross the borders."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepstack_serving.repository import TWO_STAGES, model_names, stage_names, write_repository
from demo.architectures import ARCHITECTURES
from demo.evaluate import held_out_cases, score
from demo.questions import Kind
from tests.support.raw_client import ask, request
from tests.support.server import is_whole, serving, zeroing_repository

PICTURES = 4


def figures_of(checkpoint: Path, folder: Path, repository: Path, stages: tuple[str, ...]) -> dict[str, float]:
    """Shares of exactly right answers."""
    cases = list(held_out_cases(PICTURES, [Kind.READ, Kind.PLACE]))
    with serving(checkpoint, folder / "run", repository, model_names(stages)) as server:
        requests = [request(case.question, [case.image_png], ignore_eos=False, max_tokens=40) for case in cases]
        texts = [ask(server, inputs).text for inputs in requests]
        assert is_whole(server)
    return score(cases, texts)


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_four_stages_read_pictures(family: str, tmp_path: Path) -> None:
    stages = stage_names(4)
    write_repository(tmp_path / "repository", stages)
    figures = figures_of(ARCHITECTURES[family].checkpoint, tmp_path, tmp_path / "repository", stages)
    assert figures["read"] >= 3 / 4
    assert figures["place"] == 1.0


def test_nothing_is_read_when_what_crosses_the_border_is_zeroed_there(tmp_path: Path) -> None:
    """Four of Granite's six levels go on to the late stage; the other two stay as they are."""
    repository = zeroing_repository(tmp_path / "repository", "language_early")
    figures = figures_of(ARCHITECTURES["granite"].checkpoint, tmp_path, repository, TWO_STAGES)
    assert figures["read"] == 0
