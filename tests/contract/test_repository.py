"""The committed model repository is what the package writes, and repositories of other sizes fit together."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepstack_serving.repository import model_names, stage_names, write_repository

COMMITTED = Path(__file__).parents[2] / "model_repository"


def files(folder: Path) -> dict[str, str]:
    found = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {str(path.relative_to(folder)): path.read_text() for path in found}


def test_the_committed_repository_is_the_written_one(tmp_path: Path) -> None:
    write_repository(tmp_path)
    assert files(tmp_path) == files(COMMITTED)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
def test_a_repository_holds_every_stage_and_nothing_else(tmp_path: Path, count: int) -> None:
    write_repository(tmp_path, stage_names(count))
    assert {path.name for path in tmp_path.iterdir()} == set(model_names(stage_names(count)))
