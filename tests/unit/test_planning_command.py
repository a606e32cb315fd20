"""`deepstack plan`: what it prints, its exit codes, and what it refuses."""

from __future__ import annotations

import json
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from deepstack_client.cli import main

CONFIG = str(Path(__file__).parents[1] / "data" / "configs" / "qwen3_vl_2b")
COMMAND = EntryPoint("plan", "deepstack_serving.planning.command:register", "deepstack.commands")


def plan(*words: str) -> int:
    return main(["plan", CONFIG, *words], commands=[COMMAND])


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    plan("--json", *words)
    content: dict[str, object] = json.loads(capsys.readouterr().out)
    return content


def test_text_names_models_layers_tensors_and_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--split", "14") == 0
    printed = capsys.readouterr()
    lines = [" ".join(line.split()) for line in printed.out.splitlines()]
    assert any(line.startswith("language_early 0 0-13 1.89 GiB 56 KiB ds_0 ds_1 ds_2 -") for line in lines)
    assert "language_early language_late hidden_states [tokens, 2048] BF16 4096 each" in lines
    assert "DEEPSTACK_SPLIT_POINTS=14" in lines
    assert "DEEPSTACK_DEVICES=vision_encoder=cuda:0,language_early=cuda:0,language_late=cuda:1" in lines
    assert printed.err == ""


def test_json_has_sizes_in_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    content = planned(capsys, "--stages", "1")
    assert (content["parameter_bytes"], content["fits"], content["split_points"]) == (2 * 2_127_532_032, True, [])


def test_a_given_split_is_planned_beside_the_suggested_one(capsys: pytest.CaptureFixture[str]) -> None:
    content = planned(capsys, "--split", "3")
    assert content["split_points"] == [3]
    assert content["suggested_split_points"] != [3]


def test_without_a_split_the_suggested_one_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    content = planned(capsys)
    assert content["split_points"] == content["suggested_split_points"]


def test_a_gpu_that_is_too_small_warns_and_exits_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--split", "14", "--gpu-memory-gib", "24,2") == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("warning: GPU 1: ")
    assert printed.err.count("\n") == 1
    assert "KV pools exceed its 2.00 GiB" in printed.err
    assert "DEEPSTACK_SPLIT_POINTS=" in printed.out  # the plan is there all the same


def test_a_smaller_share_for_the_kv_pools_makes_it_fit(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--gpu-memory-gib", "3,3", "--json")
    assert plan(*words) == 1
    assert "keep kv_memory_fraction below" in capsys.readouterr().err
    assert plan(*words, "--kv-memory-fraction", "0.1") == 0


def test_kv_tokens_are_what_the_pools_take(capsys: pytest.CaptureFixture[str]) -> None:
    content = planned(capsys, "--stages", "1", "--gpu-memory-gib", "24")
    (gpu,) = content["gpus"]  # type: ignore[misc]
    blocks = 12 * 2**30 // (114_688 * 64)
    assert (gpu["kv_pool_bytes"], gpu["kv_tokens"]) == (12 * 2**30, blocks * 64)  # type: ignore[index]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--stages", "4", "--split", "7"], "has 1 points, but --stages 4 needs 3"),
        (["--split", "29"], "the checkpoint has 28 layers"),
        (["--gpu-memory-gib", "24,24,24,24"], "1 to 3"),
    ],
)
def test_what_does_not_fit_the_checkpoint_is_refused(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(*words) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ")
    assert text in printed.err
    assert printed.out == ""


def test_folder_without_config_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(tmp_path)], commands=[COMMAND]) == 1
    assert "config.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["--stages", "0"],
        ["--stages", "9"],
        ["--stages", "two"],
        ["--split", "3,1"],
        ["--split", "balanced"],
        ["--gpu-memory-gib", "24,none"],
        ["--gpu-memory-gib", "0"],
        ["--gpu-memory-gib", "nan"],
        ["--gpu-memory-gib", ""],
        ["--kv-memory-fraction", "0"],
        ["--dtype", "int8"],
    ],
)
def test_ill_formed_arguments_are_wrong_usage(words: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        plan(*words)
    assert caught.value.code == 2
