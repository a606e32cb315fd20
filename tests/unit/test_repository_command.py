"""`deepstack repository`: what it writes and says, and what it refuses before it writes anything."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from deepstack_client.cli import main
from deepstack_serving.errors import SettingsError
from deepstack_serving.pipelines import Pipelines
from deepstack_serving.repository import model_names, pipelines_of, stage_names

COMMAND = EntryPoint("repository", "deepstack_serving.repository_command:register", "deepstack.commands")


def write(folder: Path, *words: str) -> int:
    return main(["repository", str(folder), *words], commands=[COMMAND])


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("count", range(1, 9))
def test_any_number_of_stages_is_written(tmp_path: Path, count: int) -> None:
    folder = tmp_path / "new" / "repository"
    assert write(folder, "--stages", str(count)) == 0
    assert names_in(folder) == set(model_names(stage_names(count)))
    assert pipelines_of(folder).stages == stage_names(count)


def test_it_says_how_to_serve_and_what_to_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "four", "--stages", "4", "--split", "9,18,27")
    printed = capsys.readouterr().out
    assert f"deepstack serve --model-repository {tmp_path / 'four'} --checkpoint DIR" in printed
    assert "--setting split_points=9,18,27" in printed
    assert "DEEPSTACK_SPLIT_POINTS=9,18,27" in printed
    devices = "vision_encoder=cuda:0,language_0=cuda:0,language_1=cuda:1,language_2=cuda:2,language_3=cuda:3"
    assert f"DEEPSTACK_DEVICES={devices}" in printed


def test_pipelines_begin_each_on_a_gpu_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert write(tmp_path / "two", "--pipelines", "2") == 0
    assert pipelines_of(tmp_path / "two") == Pipelines(stage_names(2), 2)
    first = "vision_encoder=cuda:0,language_early=cuda:0,language_late=cuda:1"
    second = "vision_encoder_p2=cuda:1,language_early_p2=cuda:1,language_late_p2=cuda:0"
    assert f"DEEPSTACK_DEVICES={first},{second}\n" in capsys.readouterr().out
    write(tmp_path / "whole", "--stages", "1", "--pipelines", "2")
    devices = "vision_encoder=cuda:0,language=cuda:0,vision_encoder_p2=cuda:1,language_p2=cuda:1"
    assert f"DEEPSTACK_DEVICES={devices}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", [["--split", "3,5"], ["--stages", "4", "--split", "3"], ["--stages", "1", "--split", "3"]]
)
def test_split_of_another_length_is_refused(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert write(tmp_path / "new", *words) == 1
    assert "points, but --stages" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["--stages", "0"],
        ["--pipelines", "9"],
        ["--stages", "9"],
        ["--stages", "3", "--split", "5,3"],
        ["--split", "-1"],
    ],
)
def test_ill_formed_arguments_are_wrong_usage(tmp_path: Path, words: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        write(tmp_path / "new", *words)
    assert caught.value.code == 2
    assert not (tmp_path / "new").exists()


def test_folder_with_content_is_refused_and_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "--stages", "3")
    assert write(tmp_path, "--stages", "2") == 1
    assert "is not empty" in capsys.readouterr().err
    assert pipelines_of(tmp_path).stages == stage_names(3)


def test_force_replaces_all_models_of_an_earlier_repository(tmp_path: Path) -> None:
    write(tmp_path, "--stages", "3")
    assert write(tmp_path, "--stages", "2", "--force") == 0
    assert names_in(tmp_path) == set(model_names())


def test_force_keeps_what_is_not_a_model_of_this_project(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "--stages", "3")
    foreign = tmp_path / "resnet" / "1"
    foreign.mkdir(parents=True)
    (foreign / "model.py").write_text("import torch")
    (tmp_path / "notes.txt").write_text("mine")
    assert write(tmp_path, "--force") == 1
    assert "holds notes.txt, resnet" in capsys.readouterr().err
    assert names_in(tmp_path) == {*model_names(stage_names(3)), "resnet", "notes.txt"}


def test_file_in_the_place_of_the_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("mine")
    assert write(tmp_path / "file", "--force") == 1
    assert "is not a folder" in capsys.readouterr().err


def test_folder_without_an_orchestrator_has_no_stages(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="has no parameter 'language_stages'"):
        pipelines_of(tmp_path)
