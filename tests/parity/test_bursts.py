"""Decode bursts answer as single steps do, to the last bit: the stages run several steps by themselves in one call."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from deepstack_serving.errors import StageError
from deepstack_serving.stages.call import LanguageCall
from tests.support.asking import MIXED, TEXT, Answer, Ask, answer, picture, submit
from tests.support.local import Change, CollectingReply, LocalServer, keep, local_settings, zero_deepstack

STEPS = 4
TOLERANCE = 1e-5
SAMPLED: dict[str, Any] = {"temperature": 1.2, "top_k": 100, "top_p": 0.95, "min_p": 0.01}
ASKS = (*MIXED, Ask("a"), Ask("what is shown in this picture?", (picture(70, 100, 5),)))
one_family = pytest.mark.parametrize("checkpoint", ["qwen3_vl"], indirect=True, scope="session")
Told = list[tuple[str, str | None, int]]


def server_of(checkpoint: Path, stages: int, steps: int, change: Change = keep) -> LocalServer:
    return LocalServer(local_settings(checkpoint, decode_steps_per_call=steps), stages, change, held=True)


def ask_all(server: LocalServer, **sampling: Any) -> list[CollectingReply]:
    """All questions at once, for answers of different lengths."""
    replies = [
        submit(server, ask, seed=place, **{"max_tokens": 5 + 3 * place, **sampling}) for place, ask in enumerate(ASKS)
    ]
    server.start()
    return [reply.wait() for reply in replies]


def run(
    checkpoint: Path, stages: int, steps: int, change: Change = keep, **sampling: Any
) -> tuple[list[Answer], Told, int]:
    """The answers, what else clients were told, and how many calls were part of a burst."""
    with server_of(checkpoint, stages, steps, change) as server:
        replies = ask_all(server, **sampling)
        calls = sum(steps > 1 for _, steps in server.port.steps)
    return [answer(reply) for reply in replies], told(replies), calls


def summary(replies: list[CollectingReply]) -> list[tuple[str, str | None, int, float]]:
    """Text, finish reason, number of tokens and log-probability of answers without alternatives."""
    return [
        (reply.wait().text, last.finish_reason, last.output_tokens, last.cumulative_logprob)
        for reply in replies
        for last in reply.wait().outputs[-1:]
    ]


def told(replies: list[CollectingReply]) -> Told:
    """Text, finish reason and number of tokens of each answer."""
    return [
        (reply.text, reply.outputs[-1].finish_reason, sum(output.output_tokens for output in reply.outputs))
        for reply in replies
    ]


def assert_same(burst: tuple[list[Answer], Told, int], single: tuple[list[Answer], Told, int]) -> None:
    """But for the last bits: an answer that ends within a burst stays in the batch of the others until its end."""
    assert burst[1] == single[1]
    assert [item.ids for item in burst[0]] == [item.ids for item in single[0]]
    assert max(mine.distance(other) for mine, other in zip(burst[0], single[0], strict=True)) < TOLERANCE


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_bursts_equal_single_steps(checkpoint: Path, stages: int, sampling: dict[str, Any]) -> None:
    single, burst = (run(checkpoint, stages, steps, **sampling) for steps in (1, STEPS))
    assert burst[:2] == single[:2]
    assert single[2] == 0 < burst[2]


def test_bursts_behind_zeroed_features_differ(checkpoint: Path) -> None:
    normal, zeroed = (run(checkpoint, 2, STEPS, change)[0] for change in (keep, zero_deepstack))
    assert zeroed[1] != normal[1]
    assert zeroed[0].ids == normal[0].ids


@one_family
def test_stop_strings_within_a_burst(checkpoint: Path) -> None:
    _, whole, _ = run(checkpoint, 2, 1, max_tokens=40)
    stops = [text[place : place + 2] for place, (text, _, _) in enumerate(whole, 3)]
    single, burst = (run(checkpoint, 2, steps, max_tokens=40, stop=stops) for steps in (1, STEPS))
    assert_same(burst, single)
    assert {reason for _, reason, _ in burst[1]} == {"stop"}


@one_family
@pytest.mark.parametrize("place", [1, 2, 3, 4])
def test_end_of_sequence_within_a_burst(checkpoint: Path, tmp_path: Path, place: int) -> None:
    token = run(checkpoint, 2, 1)[0][4].ids[place]
    folder = Path(shutil.copytree(checkpoint, tmp_path / "copy"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": token}))
    single, burst = (run(folder, 2, steps, ignore_eos=False) for steps in (1, STEPS))
    assert_same(burst, single)
    assert (burst[1][4][1], burst[0][4].ids[-1]) == ("stop", token)


@one_family
@pytest.mark.parametrize("failing", [0, 1, 3])
def test_burst_in_which_a_stage_fails_is_made_up_for(
    checkpoint: Path, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(checkpoint, 4, 1)[0]
    failures = [StageError("once")]
    settings = local_settings(checkpoint, decode_steps_per_call=STEPS)
    with LocalServer(settings, 4, held=True, refusals=True) as server:
        stage = list(server.port.language.values())[failing]
        run_one, single = stage._run_one, stage.run
        is_burst = False

        def note(tensors: Mapping[str, torch.Tensor], outputs: list[str]) -> dict[str, torch.Tensor]:
            nonlocal is_burst
            is_burst = "decode_steps" in tensors and int(tensors["decode_steps"]) > 1
            return single(tensors, outputs)

        def fail_once(call: LanguageCall, outputs: list[str]) -> dict[str, torch.Tensor]:
            results = run_one(call, outputs)
            if is_burst and failures:
                raise failures.pop()
            return results

        monkeypatch.setattr(stage, "run", note)
        monkeypatch.setattr(stage, "_run_one", fail_once)
        replies = ask_all(server)
    assert [answer(reply).ids for reply in replies] == [item.ids for item in expected]
    assert not failures
    assert "once" in [str(error) for error in server.port.refusals]


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_tokens_that_are_taken_from_running_bursts_are_the_same(checkpoint: Path, stages: int) -> None:
    answers = []
    for steps in (1, STEPS):
        with server_of(checkpoint, stages, steps) as server:
            answers.append(summary(ask_all(server, logprobs=0)))
    assert answers[1] == answers[0]
    assert all(item[3] < 0 for item in answers[0])


class Gate:
    """Holds a stage before its decode step of this number until it is opened."""

    def __init__(
        self, server: LocalServer, monkeypatch: pytest.MonkeyPatch, place: int, step: int, sequences: int = 1
    ) -> None:
        self.reached, self.opened, self._left = threading.Event(), threading.Event(), step
        self._lengths = [1] * sequences
        self.steps = 0
        stage = list(server.port.language.values())[place]
        self._run_one = stage._run_one
        monkeypatch.setattr(stage, "_run_one", self._hold)

    def _hold(self, call: LanguageCall, outputs: list[str]) -> dict[str, torch.Tensor]:
        if call.query_lengths == self._lengths:
            self.steps += 1
            if self.steps == self._left:
                self.reached.set()
                assert self.opened.wait(60)
        return self._run_one(call, outputs)


@one_family
@pytest.mark.parametrize(("stages", "seen"), [(1, 4), (2, 5)])
def test_clients_get_tokens_while_their_burst_runs(
    checkpoint: Path, stages: int, seen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with server_of(checkpoint, stages, 64) as server:
        gate = Gate(server, monkeypatch, stages - 1, 5)
        reply = submit(server, ASKS[0], max_tokens=40, logprobs=0)
        server.start()
        assert gate.reached.wait(60)
        stats = server.orchestrator.engine.stats
        wait_for(lambda: stats.generated_tokens == seen)  # one from the prompt; one stage alone is a step behind
        assert reply.finals == 0
        gate.opened.set()
        assert reply.wait().outputs[-1].output_tokens == 40


@one_family
def test_who_asks_for_alternatives_holds_nobody_else_up(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tops = (0, 2)
    with server_of(checkpoint, 2, 1) as server:
        single = [submit(server, TEXT, max_tokens=20, logprobs=top) for top in tops]
        server.start()
        expected = summary(single)
    with server_of(checkpoint, 2, 64) as server:
        gate = Gate(server, monkeypatch, 1, 5, sequences=2)
        replies = [submit(server, TEXT, max_tokens=20, logprobs=top) for top in tops]
        server.start()
        assert gate.reached.wait(60)
        stats = server.orchestrator.engine.stats
        wait_for(lambda: stats.generated_tokens == 2 + 4)  # those of the prompts, and the first one's of four steps
        gate.opened.set()
        assert summary(replies) == expected
    assert replies[1].tokens == single[1].tokens


@one_family
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_request_that_comes_ends_the_burst(checkpoint: Path, stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with server_of(checkpoint, stages, 64) as server:
        alone = [summary([submit(server, ask, max_tokens=40, logprobs=0)]) for ask in ASKS[:2] if not server.start()]
        gate = Gate(server, monkeypatch, 0, 5)
        first = submit(server, ASKS[0], max_tokens=40, logprobs=0)
        assert gate.reached.wait(60)
        second = submit(server, ASKS[1], max_tokens=40, logprobs=0)
        exchange = server.orchestrator.engine._pipeline.bursts()._exchange
        assert exchange is not None
        wait_for(lambda: exchange.is_ending(exchange.burst))
        gate.opened.set()
        first.wait()
        assert gate.steps < 10  # the rest ran beside the second, in steps of two rows
        replies = [item[:3] for item in summary([first, second])]
    assert replies == [item[:3] for (item,) in alone]


@one_family
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("top", [0, 2], ids=["as they come", "with alternatives"])
def test_logits_that_are_not_finite_end_their_request_alone(
    checkpoint: Path, stages: int, top: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with server_of(checkpoint, stages, 64) as server:
        stage = list(server.port.language.values())[-1]
        run_one, steps = stage._run_one, 0

        def spoil(call: LanguageCall, outputs: list[str]) -> dict[str, torch.Tensor]:
            nonlocal steps
            results = run_one(call, outputs)
            if call.query_lengths == [1, 1]:
                steps += 1
                if steps == 5:
                    results["next_ids"][0] = -1
            return results

        monkeypatch.setattr(stage, "_run_one", spoil)
        replies = [submit(server, TEXT, max_tokens=20, logprobs=top) for _ in range(2)]
        server.start()
        assert "not finite" in str(replies[0].wait().error)
        assert replies[1].wait().outputs[-1].output_tokens == 20
        monkeypatch.undo()
        again = submit(server, TEXT, max_tokens=20, logprobs=top).wait()
        assert replies[1].text == again.text


def wait_for(condition: Callable[[], bool]) -> None:
    """Give the other threads the time to come there."""
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
