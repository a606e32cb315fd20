"""The GPU benchmark's measuring parts: arms and their limits, loads, profiles, memory."""

from __future__ import annotations

import json
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import pytest

from bench.failures import BenchError
from bench.gpu import memory, profile
from bench.gpu.arms import Command, Phases, parse_phases, run_arm
from bench.gpu.crowd import figures, run_crowd, split
from bench.gpu.hardware import parse_gpus
from bench.gpu.shapes import shape
from bench.gpu.shrink import shrink
from bench.gpu.workload import Requests, check_lengths
from bench.records import Case, Record
from bench.serving import ModelStatistics
from deepstack_serving.checkpoint import open_config

LONG_S = 60.0


def arm(code: str, limit_s: float = LONG_S) -> Command:
    return Command("an arm", [sys.executable, "-c", code], limit_s)


def test_a_failed_phase_is_recorded_and_the_next_one_runs(capsys: pytest.CaptureFixture[str]) -> None:
    phases = Phases(LONG_S)
    assert phases.run("first", lambda: 1 / 0) is None
    assert phases.run("second", lambda: {"value": 1}) == {"value": 1}

    first, second = parse_phases(capsys.readouterr().out)
    assert "ZeroDivisionError" in first["error"] and second["result"] == {"value": 1}


def test_a_phase_that_takes_too_long_is_ended(capsys: pytest.CaptureFixture[str]) -> None:
    def wait() -> None:
        while True:
            time.sleep(LONG_S)

    assert Phases(LONG_S).run("endless", wait, limit_s=0.05) is None
    assert "not done after 0.05 s" in parse_phases(capsys.readouterr().out)[0]["error"]


def test_an_arm_that_takes_too_long_keeps_its_finished_phases() -> None:
    line = json.dumps({"phase": "first", "result": 1})
    record = run_arm(arm(f"import time; print('{line}', flush=True); time.sleep(600)", limit_s=2.0))
    assert record["phases"] == [{"phase": "first", "result": 1}] and record["error"] == "stopped after 2 s"


def test_an_arm_that_crashes_says_its_status() -> None:
    record = run_arm(arm("print('hello'); raise SystemExit(3)"))
    assert (record["error"], record["phases"], record["other_output"]) == ("ended with status 3", [], ["hello"])


def test_a_line_that_was_cut_off_is_left_out() -> None:
    assert parse_phases('{"phase": "a", "result": 1}\n{"phase": "b", "res') == [{"phase": "a", "result": 1}]


def test_clients_and_cases_are_spread_evenly() -> None:
    cases = [Case(None, str(number), 1) for number in range(128)]
    shares = split(64, cases)
    assert [(clients, len(share)) for clients, share in shares] == [(16, 32)] * 4
    assert {case for _, share in shares for case in share} == set(cases)
    assert [(clients, len(share)) for clients, share in split(2, cases[:3])] == [(2, 3)]


def test_figures_of_a_crowd() -> None:
    records = [Record(first_s, first_s + 1.0, 1, 11, 128, "") for first_s in (0.1, 0.3)]
    found = figures(records, 2.0, 2)
    assert (found["tokens_per_s"], found["requests_per_s"]) == (11.0, 1.0)
    assert found["first_token_ms"]["p50"] == pytest.approx(200.0)
    assert found["per_token_ms"]["p50"] == pytest.approx(100.0)


def test_whole_answers_have_no_time_per_token() -> None:
    assert figures([Record(1.0, 1.0, 11, 11, 128, "")], 1.0, 1)["per_token_ms"] is None


def test_a_server_that_is_not_there_fails_the_crowd() -> None:
    with pytest.raises(BenchError, match="ended with status 1"):
        run_crowd("127.0.0.1:9", 1, [Case(None, "1", 1)], stream=True)


def test_questions_have_as_many_digits_as_tokens_are_left(tmp_path: Path) -> None:
    requests = Requests(tmp_path, 64, 16)
    requests.learn(lambda case: 9 if case.picture is None else 1035)

    image, text = requests.image(1, 1024)[0], requests.text(1)[0]

    assert (len(image.question), len(text.question)) == (66 - (1034 - 1024), 128 - 8)
    assert image.picture is not None and Path(image.picture).is_file()


def test_pictures_and_questions_differ(tmp_path: Path) -> None:
    requests = Requests(tmp_path, 64, 16)
    requests.learn(lambda case: 9)
    made = [*requests.image(2, None), *requests.image(10, None)]
    assert len({case.question for case in made}) == 12
    assert len({Path(str(case.picture)).read_bytes() for case in made}) == 12


def test_a_prompt_of_another_length_fails_the_phase() -> None:
    with pytest.raises(BenchError, match=r"prompts of \[1091\] tokens instead of 1090"):
        check_lengths([Record(1, 2, 1, 2, 1090, ""), Record(1, 2, 1, 2, 1091, "")], 1090)


def test_a_profile_is_per_unit_of_work() -> None:
    before = {"early": ModelStatistics(10, 0, 0), "late": ModelStatistics(10, 0, 0)}
    after = {"early": ModelStatistics(20, 40_000, 0, queue_ns=10_000), "late": ModelStatistics(15, 20_000, 0)}

    found = profile.profile(before, after, units=10, client_s=20e-6)

    assert (
        found["models"]["early"] | {"compute_infer": 4.0, "queue": 1.0, "executions": 1.0} == found["models"]["early"]
    )
    assert (found["models"]["late"]["executions"], found["outside_us"]) == (0.5, pytest.approx(13.0))
    assert [row[0] for row in profile.rows(found)] == ["early", "late", "outside of all of them", "at the client"]


def test_gpus_are_read_from_nvidia_smi() -> None:
    (found,) = parse_gpus("0, NVIDIA H200, 612, 143771, 580.159.03, 1980, 31\n")
    assert (found["index"], found["name"], found["memory.used"]) == (0, "NVIDIA H200", 612)


@pytest.mark.parametrize(("name", "gigabytes"), [("2b", 3.44), ("8b", 15.14), ("30b-a3b", 6.08)])
def test_a_step_reads_layers_and_head_but_only_the_experts_that_it_takes(
    name: str, gigabytes: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(shape(name).config))
    monkeypatch.setattr(memory, "open_checkpoint", open_config)  # a config without weights is enough
    assert memory.bytes_read_per_step(tmp_path) / 1e9 == pytest.approx(gigabytes, abs=0.01)


def test_shrunken_wheels_hold_the_same_files(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a-1-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr("a/__init__.py", "x = 1\n" * 1000)

    with tarfile.open(shrink(tmp_path)) as archive:
        archive.extractall(tmp_path / "out", filter="data")

    assert not list(tmp_path.glob("*.whl"))
    with zipfile.ZipFile(tmp_path / "out" / "a-1-py3-none-any.whl") as wheel:
        assert wheel.read("a/__init__.py") == b"x = 1\n" * 1000
