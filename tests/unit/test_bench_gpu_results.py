"""What the GPU benchmark makes of its records: targets, merged runs, tables, charts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import h200
from bench.failures import BenchError
from bench.gpu import vllm
from bench.gpu.chart import draw, levels
from bench.gpu.results import Results, by_shape, read_runs
from bench.gpu.table import report, targets_table
from bench.gpu.targets import TARGETS_8B, targets_of

VLLM_OUTPUT = """\
INFO something else
start s 139.2
prompt tokens 1090
1 client, image: TTFT 113.0 ms, TPOT 5.49 ms
1 client, text: TTFT 13.0 ms, TPOT 5.39 ms
64 at once, 128 requests, image=True: 1873 tok/s, 14.63 req/s, 8.75 s
64 at once, 128 requests, image=False: 8173 tok/s, 63.85 req/s, 2.00 s
"""
PER_TOKEN, ONE_STAGE = TARGETS_8B[:2]


def phase(name: str, **result: Any) -> dict[str, Any]:
    return {"phase": name, "seconds": 1.0, "result": result}


def many(clients: int, tokens_per_s: float, kind: str = "image") -> dict[str, Any]:
    percentiles = {"p50": 10.0, "p95": 20.0}
    times = dict.fromkeys(("first_token_ms", "per_token_ms", "whole_ms"), percentiles)
    rates = {"tokens_per_s": tokens_per_s, "requests_per_s": 1.0}
    return phase(f"{kind}, {clients} at once", clients=clients, requests=2 * clients, wall_s=1.0, **rates, **times)


def server(*phases: dict[str, Any], stages: int = 2, devices: str = "", **record: Any) -> dict[str, Any]:
    chosen = {"devices": devices} if devices else {}
    return {"arm": "server", "stages": stages, "settings": chosen, "chosen": chosen, "phases": [*phases], **record}


def alone(per_token_ms: float) -> dict[str, Any]:
    times = {"first_token_ms": 50.0, "per_token_ms": per_token_ms, "tokens_per_s": 100.0}
    return phase("image, 1 client", **times, samples=[], input_tokens=1090)


def run(*arms: dict[str, Any], shape: str = "8b") -> dict[str, Any]:
    about = {"date": "2026-11-30T00:00:00+00:00", "command": "python -m bench.h200", "gpus": [], "cores": 16}
    machine = {"processor": "a processor", "python": "3.12", "packages": {"torch": "2.11.0", "none": "not installed"}}
    return {**about, **machine, "shape": shape, "checkpoint": {"bytes_read_per_step": 4 * 10**9}, "arms": [*arms]}


def test_vllms_lines_become_phases_named_as_the_servers() -> None:
    found = {item["phase"]: item["result"] for item in vllm.parse_output(VLLM_OUTPUT)}

    assert found["start 1"] == {"seconds": 139.2} and found["overheads"] == {"input_tokens": 1090}
    assert found["image, 1 client"] == {"first_token_ms": 113.0, "per_token_ms": 5.49}
    assert found["text, 64 at once"]["tokens_per_s"] == 8173.0 and found["image, 64 at once"]["requests"] == 128


def test_a_folder_without_vllm_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="vllm is not there"):
        vllm.command(tmp_path, None, tmp_path, 1024, 128, 64)


@pytest.mark.parametrize(
    ("measured", "verdict"),
    [
        (5.3, "aim met"),
        (6.5, "first target met"),
        (7.15, "missed by 10.0%"),
        (6.51, "missed by 0.2%"),
        (None, "not measured"),
    ],
)
def test_verdict_of_a_time(measured: float | None, verdict: str) -> None:
    assert PER_TOKEN.verdict(measured) == verdict


def test_verdict_of_a_rate_is_the_other_way_round() -> None:
    rate = next(target for target in TARGETS_8B if target.higher)
    assert (rate.verdict(3000), rate.verdict(1900), rate.verdict(950)) == (
        "aim met",
        "first target met",
        "missed by 50.0%",
    )


def test_other_shapes_are_measured_against_the_time_to_read_their_weights() -> None:
    first, *others = targets_of("2b", 1.0)
    assert (first.first, first.aim) == pytest.approx((2.6, 2.1))
    assert all(target.first is None for target in others)


def test_a_figure_is_that_of_the_server_with_its_stages() -> None:
    results = Results([run(server(alone(6.0)), server(alone(5.5), stages=1))])
    assert (results.measured(PER_TOKEN), results.measured(ONE_STAGE)) == (6.0, 5.5)


def test_a_later_run_wins_and_a_failed_phase_does_not() -> None:
    failed = {"phase": "image, 1 client", "seconds": 1.0, "error": "out of memory"}
    results = Results([run(server(alone(6.0))), run(server(alone(5.0))), run(server(failed))])
    assert results.measured(PER_TOKEN) == 5.0
    assert "out of memory" in report(results.runs)


def test_only_a_start_that_found_compiled_code_counts_as_warm() -> None:
    starts = [phase(f"start {n}", seconds=s, compiled_code_was_there=n > 1) for n, s in ((1, 200.0), (2, 40.0))]
    (warm,) = (target for target in TARGETS_8B if target.phase == "warm start")
    assert Results([run(server(*starts))]).measured(warm) == 40.0
    assert Results([run(server(starts[0]))]).measured(warm) is None


def test_floor_is_the_weights_over_the_measured_bandwidth() -> None:
    assert Results([run({"arm": "limits", "phases": [phase("copy", bytes_per_s=4e12)]})]).floor_ms == 1.0


def test_table_has_the_peers_side_by_side() -> None:
    peers = {"arm": "vllm", "phases": vllm.parse_output(VLLM_OUTPUT)}
    eager = {"arm": "generate eager", "phases": [alone(54.0)]}
    batched = {"arm": "generate batched", "phases": [phase("text, 64 at once", tokens_per_s=1000.0)]}

    table = targets_table("8b", Results([run(server(alone(6.0)), peers, eager, batched)]))

    cells = {
        line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]] for line in table.splitlines()
    }
    assert cells[PER_TOKEN.label] == ["54.0", "-", "5.49", "6.50", "5.30", "6.00", "first target met"]
    assert cells["output tokens/s, 64 at once, text 128 in"][:3] == ["1000", "-", "8173"]


def test_two_gpus_are_compared_with_one() -> None:
    devices = "vision_encoder=cuda:0,language_early=cuda:0,language_late=cuda:1"
    both = run(server(many(64, 1000.0)), server(many(64, 1700.0), devices=devices))
    (rate,) = (target for target in TARGETS_8B if target.phase == "image, 64 at once")
    assert Results([both]).measured(rate) == 1000.0
    (line,) = (line for line in report([both]).splitlines() if "two GPUs over one, 64 at once, image" in line)
    assert "1.70" in line and "first target met" in line


def test_pipelines_are_a_line_of_their_own() -> None:
    devices = "vision_encoder=cuda:0,vision_encoder_p2=cuda:1"
    two = {**server(many(64, 1600.0), devices=devices), "pipelines": 2}
    one = {**server(many(64, 1400.0), devices=devices), "pipelines": 1}
    lines = report([run(server(many(64, 1000.0)), two, one)]).splitlines()
    shown = {line.split("|")[1].strip(): line for line in lines if "two GPUs over one" in line}
    assert "1.60" in shown["two GPUs over one, 64 at once, image, two pipelines"]
    assert "1.40" in shown["two GPUs over one, 64 at once, image"]
    assert any("2 GPUs, 2 pipelines" in line for line in lines if line.startswith("### Server"))


def test_runs_of_several_files_are_joined_by_shape(tmp_path: Path) -> None:
    for name, shape in (("a", "8b"), ("b", "2b"), ("c", "8b")):
        (tmp_path / name).write_text(json.dumps({"runs": [run(shape=shape)]}))
    found = by_shape(read_runs([tmp_path / name for name in "abc"]))
    assert {shape: len(results.runs) for shape, results in found.items()} == {"8b": 2, "2b": 1}


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(BenchError, match=r"other\.json holds no results"):
        read_runs([tmp_path / "other.json"])


def test_points_of_the_chart_are_the_streamed_levels() -> None:
    whole = phase("image, 4 at once, whole answers", clients=4, per_token_ms=None)
    arm = Results([run(server(many(4, 300.0), alone(6.0), many(2, 200.0), whole))]).arms[0]
    assert levels(arm.phases(), "image") == [(1, 6.0, 100.0), (2, 10.0, 200.0), (4, 10.0, 300.0)]


def test_chart_is_drawn_in_both_formats(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results = Results(
        [run(server(alone(6.0), many(64, 2000.0)), {"arm": "vllm", "phases": vllm.parse_output(VLLM_OUTPUT)})]
    )

    paths = draw("8b", results, tmp_path, "h200-8b")

    assert [path.name for path in paths] == ["h200-8b.png", "h200-8b.svg"]
    assert all(path.stat().st_size > 1000 for path in paths)


def test_the_command_merges_files_into_one_table_and_chart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, arm in (("a", server(alone(6.0))), ("b", server(alone(5.5), stages=1))):
        (tmp_path / f"{name}.json").write_text(json.dumps({"runs": [run(arm)]}))
    files = [str(tmp_path / f"{name}.json") for name in "ab"]
    monkeypatch.setattr(sys, "argv", ["h200", "--merge", *files, "--output", str(tmp_path / "out"), "--name", "all"])

    assert h200.main() == 0

    written = {path.name: path for path in (tmp_path / "out").iterdir()}
    assert {"2026-11-30-all.json", "2026-11-30-all.md"} <= written.keys()
    assert len(read_runs([written["2026-11-30-all.json"]])) == 2
    table = written["2026-11-30-all.md"].read_text()
    assert "2 language stages" in table and "1 language stage," in table


def test_the_command_refuses_a_file_of_something_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["h200", "--merge", str(tmp_path / "none.json"), "--output", str(tmp_path)])
    assert h200.main() == 1
    assert "none.json holds no results" in capsys.readouterr().err
