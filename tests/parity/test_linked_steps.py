"""A step of all stages called at once answers as one that goes from stage to stage, to the last bit, images included.

Features that a later stage needs are handed on by the stages before it: such a step is never linked.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from deepstack_serving.engine.burst_calls import BurstCalls
from deepstack_serving.engine.encode_queue import EncodeQueue
from deepstack_serving.engine.sequence import Sequence
from deepstack_serving.errors import InvalidRequestError, StageError
from deepstack_serving.stages.call import LanguageCall
from tests.support.asking import MIXED, ONE_IMAGE, TEXT, Answer, Ask, answer, ask_together, submit
from tests.support.local import LocalServer, keep, local_settings, zero_deepstack

LINKING, PLAIN = 4, 1  # decode steps a call: with more than one of them stages may be called at once
one_family = pytest.mark.parametrize("checkpoint", ["qwen3_vl"], indirect=True, scope="session")


def answers_of(checkpoint: Path, stages: int, steps: int, **settings: object) -> tuple[list[Answer], list[str]]:
    """The answers to MIXED, and the stages that were called for a linked step with features."""
    chosen = local_settings(checkpoint, decode_steps_per_call=steps, prefill_token_budget=100, **settings)
    with LocalServer(chosen, stages, held=True) as server:
        answers = ask_together(server, MIXED)
        linked = [model for model, inputs in server.port.calls if {"exchange", "feature_rows"} <= set(inputs)]
    return answers, linked


@pytest.mark.parametrize("stages", [2, 4])
def test_linked_steps_equal_steps_from_stage_to_stage(checkpoint: Path, stages: int) -> None:
    plain, none = answers_of(checkpoint, stages, PLAIN)
    linked, _ = answers_of(checkpoint, stages, LINKING)
    assert linked == plain
    assert not none


@pytest.mark.parametrize("stages", [2, 4])
def test_groups_link_their_steps_over_memory_of_their_own(checkpoint: Path, stages: int) -> None:
    asks = [Ask(f"{word} " * 120) for word in ("count", "read")]  # steps of text, which are linked at any split
    with LocalServer(local_settings(checkpoint, prefill_token_budget=100), stages, held=True) as server:
        plain = ask_together(server, asks)
    settings = local_settings(checkpoint, decode_steps_per_call=LINKING, prefill_token_budget=100, micro_batches=2)
    with LocalServer(settings, stages, held=True) as server:
        answers = ask_together(server, asks)
        memories = {bursts._exchange.path for bursts in server.orchestrator.engine._pipeline._bursts.values()}
        assert any("exchange" in inputs for _, inputs in server.port.calls)
    assert [item.ids for item in answers] == [item.ids for item in plain]
    assert max(mine.top_distance(other) for mine, other in zip(answers, plain, strict=True)) < 1e-4
    assert len(memories) == 2


@one_family
def test_features_of_the_first_stage_are_linked_and_others_handed_on(checkpoint: Path) -> None:
    """Its layers 0 to 2 take features."""
    by_split = {split: answers_of(checkpoint, 2, LINKING, split_points=split) for split in (2, 3)}
    assert not by_split[2][1]
    assert set(by_split[3][1]) == {"language_early"}
    assert by_split[2][0] == answers_of(checkpoint, 2, PLAIN, split_points=2)[0]


def test_zeroed_features_differ_in_linked_steps(checkpoint: Path) -> None:
    answers = []
    for change in (keep, zero_deepstack):
        settings = local_settings(checkpoint, decode_steps_per_call=LINKING)
        with LocalServer(settings, 2, change, held=True) as server:
            answers.append(ask_together(server, [ONE_IMAGE])[0])
    assert answers[0].top_distance(answers[1]) > 0.1


@one_family
@pytest.mark.parametrize("failing", [0, 1, 3])
@pytest.mark.parametrize("together", [1, 3])
def test_linked_step_that_fails_is_made_again_from_stage_to_stage(
    checkpoint: Path, failing: int, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asks = [TEXT, *MIXED][:together]
    settings = local_settings(checkpoint, decode_steps_per_call=LINKING)
    with LocalServer(settings, 4, held=True) as server:
        expected = [item.ids for item in ask_together(server, asks)]
    with LocalServer(settings, 4, held=True, refusals=True) as server:
        stage = list(server.port.language.values())[failing]
        run_one, failures = stage._run_one, [StageError("once")]

        def fail_once(call: LanguageCall, outputs: list[str]) -> dict[str, torch.Tensor]:
            results = run_one(call, outputs)
            if failures:
                raise failures.pop()
            return results

        monkeypatch.setattr(stage, "_run_one", fail_once)
        assert [item.ids for item in ask_together(server, asks)] == expected
        assert "once" in [str(error) for error in server.port.refusals]


@one_family
def test_one_requests_fault_stays_its_own(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = local_settings(checkpoint, decode_steps_per_call=LINKING)
    with LocalServer(settings, 2, held=True) as server:
        expected = ask_together(server, [TEXT])[0].ids
    with LocalServer(settings, 2, held=True, refusals=True) as server:
        stage = server.port.language["language_late"]
        run_one = stage._run_one

        def refuse_images(call: LanguageCall, outputs: list[str]) -> dict[str, torch.Tensor]:
            if max(call.query_lengths) > 24:  # the one of text
                raise InvalidRequestError("too long for this stage")
            return run_one(call, outputs)

        monkeypatch.setattr(stage, "_run_one", refuse_images)
        replies = [submit(server, ask) for ask in (TEXT, ONE_IMAGE)]
        server.start()
        assert answer(replies[0].wait()).ids == expected
        assert "too long for this stage" in str(replies[1].wait().error)


@one_family
def test_without_shared_memory_steps_go_from_stage_to_stage(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    expected, _ = answers_of(checkpoint, 2, PLAIN)
    monkeypatch.setattr("deepstack_serving.engine.burst_calls.Exchange.create", full)
    answers, linked = answers_of(checkpoint, 2, LINKING)
    assert (answers, linked) == (expected, [])


@one_family
def test_step_of_more_rows_than_a_link_holds_goes_from_stage_to_stage(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = answers_of(checkpoint, 2, PLAIN, max_running_requests=len(MIXED))
    monkeypatch.setattr("deepstack_serving.engine.burst_calls.MOST_LINK_BYTES", 1)  # so many as may run
    answers, linked = answers_of(checkpoint, 2, LINKING, max_running_requests=len(MIXED))
    assert answers == expected
    assert not linked


@one_family
@pytest.mark.parametrize("steps", [PLAIN, LINKING])
def test_images_wait_for_company_beside_a_step_only(
    checkpoint: Path, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else an image would wait until a whole step is over."""
    begin, seen = EncodeQueue.begin, set()

    def watched(queue: EncodeQueue, running: list[Sequence], *arguments: Any, patient: bool = False) -> None:
        seen.add((patient, any(item.is_in_step for item in running)))
        begin(queue, running, *arguments, patient=patient)

    monkeypatch.setattr(EncodeQueue, "begin", watched)
    with LocalServer(local_settings(checkpoint, decode_steps_per_call=steps), 2, held=True) as server:
        ask_together(server, MIXED)
    assert seen == ({(False, False), (True, True)} if steps == LINKING else {(False, False)})


@one_family
@pytest.mark.parametrize("groups", [1, 2])
def test_memory_is_told_how_each_linked_step_ended(
    checkpoint: Path, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After some failures in a row it is made anew."""
    ended, told = BurstCalls.ended, []

    def watched(calls: BurstCalls, error: Exception | None) -> None:
        told.append(error)
        ended(calls, error)

    monkeypatch.setattr(BurstCalls, "ended", watched)
    settings = local_settings(checkpoint, decode_steps_per_call=LINKING, micro_batches=groups)
    with LocalServer(settings, 2, held=True, refusals=True) as server:
        stage = server.port.language["language_late"]
        run_one, failures = stage._run_one, [StageError("once")]

        def fail_once(call: LanguageCall, outputs: list[str]) -> dict[str, torch.Tensor]:
            if failures:
                raise failures.pop()
            return run_one(call, outputs)

        monkeypatch.setattr(stage, "_run_one", fail_once)
        ask_together(server, MIXED)
    assert [str(error) for error in told if error] == ["once"]
    assert None in told
