"""What the benchmarks make of the tools' exports and of their own measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench import aiperf, perf_analyzer
from bench.decode_step import figures
from bench.failures import BenchError
from bench.figures import markdown_table, percentile
from bench.machine import processor_name
from bench.records import Case, Record, check, summary
from bench.serving import ModelStatistics, parse_statistics

RUN = perf_analyzer.PerfRun("orchestrator", 2, 2, Path("input.json"), tokens_per_request=10)
AIPERF_RUN = aiperf.AIPerfRun(1, 3, Path("checkpoint"), Path("template"))


def _export(*requests: tuple[int, list[int]]) -> dict[str, Any]:
    """Requests as (start, responses), in milliseconds."""
    return {
        "experiments": [
            {
                "requests": [
                    {"timestamp": start * 10**6, "response_timestamps": [time * 10**6 for time in responses]}
                    for start, responses in requests
                ]
            }
        ]
    }


def _aiperf_export(**changes: Any) -> dict[str, Any]:
    numbers = {"avg": 1.0, "p50": 2.0, "p95": 3.0, "p99": 4.0}
    names = ("request_throughput", "time_to_first_token", "inter_token_latency", "request_latency")
    whole = {**dict.fromkeys((*names, "output_token_throughput"), numbers), "request_count": {"avg": 3.0}}
    return {**whole, **changes}


def test_percentile_lies_between_the_nearest_values() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5


def test_percentile_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


def test_a_table_puts_numbers_on_the_right() -> None:
    assert markdown_table(("name", "ms"), [["a", 12.34], ["b", None]]) == (
        "| name |   ms |\n| ---- | ---: |\n| a    | 12.3 |\n| b    |    - |"
    )


def test_latency_runs_to_the_last_response() -> None:
    result = perf_analyzer.parse_export(_export((0, [10, 100]), (0, [20, 100])), RUN)

    assert (result.p50_ms, result.first_p50_ms) == (100.0, 15.0)


def test_throughput_counts_requests_and_tokens_from_first_start_to_last_end() -> None:
    result = perf_analyzer.parse_export(_export((0, [400]), (100, [500])), RUN)

    assert (result.requests_per_s, result.tokens_per_s) == (4.0, 40.0)


def test_a_request_without_response_fails_the_run() -> None:
    with pytest.raises(BenchError, match="1 unanswered"):
        perf_analyzer.parse_export(_export((0, [400]), (100, [])), RUN)


def test_a_missing_request_fails_the_run() -> None:
    with pytest.raises(BenchError, match="1 of 2 requests"):
        perf_analyzer.parse_export(_export((0, [400])), RUN)


def test_aiperf_figures_are_read_by_name() -> None:
    result = aiperf.parse_export(_aiperf_export(time_to_first_token={"p50": 7.0, "p95": 8.0}), AIPERF_RUN)

    assert (result.ttft_p50_ms, result.ttft_p95_ms, result.itl_p50_ms) == (7.0, 8.0, 2.0)


def test_a_failed_aiperf_request_fails_the_run() -> None:
    with pytest.raises(BenchError, match="1 failed"):
        aiperf.parse_export(_aiperf_export(error_request_count={"avg": 1.0}), AIPERF_RUN)


def test_too_few_aiperf_requests_fail_the_run() -> None:
    with pytest.raises(BenchError, match="2 of 3 requests"):
        aiperf.parse_export(_aiperf_export(request_count={"avg": 2.0}), AIPERF_RUN)


def test_time_per_token_leaves_the_first_tokens_out() -> None:
    assert Record(1.0, 3.0, 2, 6, 10, "").per_token_s == 0.5


def test_a_short_answer_fails_the_run() -> None:
    with pytest.raises(BenchError, match="5 tokens came instead of 6"):
        check(Record(1.0, 3.0, 1, 5, 10, ""), Case(None, "", 6))


def test_a_summary_takes_medians() -> None:
    records = [Record(first_s, first_s + 1.0, 1, 11, 10, "") for first_s in (0.1, 0.2, 0.9)]

    assert summary(records)["first_token_ms"] == 200.0


def test_statistics_are_read_from_tritons_json() -> None:
    times = {"compute_infer": {"count": 2, "ns": 500}, "fail": {"count": 1, "ns": 0}}

    assert parse_statistics({"model_stats": [{"execution_count": 2, "inference_stats": times}]}) == ModelStatistics(
        executions=2, compute_infer_ns=500, failures=1
    )


def test_decode_overhead_is_what_the_stages_did_not_take() -> None:
    inside = {"early": ModelStatistics(10, 3_000_000, 0), "late": ModelStatistics(10, 4_000_000, 0)}

    step = figures(1000.0, inside, {"early": 200.0, "late": 250.0})

    assert (step["outside_triton_compute"], step["outside_stages"]) == (300.0, 550.0)


def test_the_processor_is_named_with_family_and_model() -> None:
    assert processor_name("cpu family\t: 26\nmodel\t\t: 2\nmodel name\t: AMD EPYC\n") == "AMD EPYC (family 26, model 2)"
