"""How long a burst may be, and that the calls of one end together whatever one of them fails of."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from deepstack_serving.engine.block_allocator import BlockAllocator
from deepstack_serving.engine.burst_calls import BurstCalls
from deepstack_serving.engine.burst_policy import SHARE_WHILE_ENCODING, BurstPolicy
from deepstack_serving.engine.events import Failure, Tokens
from deepstack_serving.engine.pipeline import StepTokens
from deepstack_serving.engine.progress import NOT_FINITE, record
from deepstack_serving.engine.scheduler import Scheduler, Work
from deepstack_serving.engine.sequence import Status
from deepstack_serving.errors import StageError
from deepstack_serving.exchange import Exchange, ExchangeDoor
from deepstack_serving.stages.info import StageInfo
from tests.support.sequences import advance, sequence

ON_CPU = (StageInfo("language", "", "FP32", "cpu", ""),)
ON_GPUS = tuple(StageInfo("language", "", "FP32", f"cuda:{index}", "") for index in range(2))


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def decoding(*max_tokens: int, waiting: int = 8, running: int = 8) -> Scheduler:
    """A scheduler whose sequences have computed their prompts."""
    made = Scheduler(BlockAllocator(100, 4), running, waiting, 100)
    for count in max_tokens:
        made.add(sequence(3, count))
    made.admit()
    advance(made)
    return made


def steps(made: Scheduler, setting: int = 8, policy: BurstPolicy | None = None) -> int:
    return (policy or BurstPolicy(setting)).steps(made, made.plan(), ON_CPU)


def test_burst_is_as_long_as_the_setting_says() -> None:
    assert [steps(decoding(40, 50), setting) for setting in (1, 4, 8)] == [1, 4, 8]


def test_automatic_bursts_are_for_gpus() -> None:
    made, policy = decoding(40), BurstPolicy(0)
    mixed = (*ON_CPU, *ON_GPUS)
    assert [policy.steps(made, made.plan(), infos) for infos in (ON_CPU, mixed, ON_GPUS)] == [1, 1, 8]


@pytest.mark.parametrize(("left", "expected"), [(1, 1), (2, 2), (7, 7), (9, 8)])
def test_burst_ends_with_the_first_answer_that_is_full(left: int, expected: int) -> None:
    assert steps(decoding(left + 1, 40)) == expected


def test_no_burst_beside_a_prompt() -> None:
    made = decoding(40)
    made.add(sequence(5, 40))
    made.admit()
    assert steps(made) == 1


def test_bursts_are_short_while_images_are_encoded() -> None:
    made = decoding(40)
    longest = steps(made)
    made.add(sequence(5, 40, files=(b"image",)))
    made.admit()
    assert steps(made) == longest // SHARE_WHILE_ENCODING > 1


def test_no_burst_while_requests_wait() -> None:
    made = decoding(40, running=1)
    made.add(sequence(5, 40))
    assert (made.admit(), steps(made)) == ([], 1)


def test_no_burst_with_several_groups() -> None:
    made = decoding(40)
    made.set_groups(2)
    assert steps(made) == 1


@pytest.mark.parametrize(("gap_s", "expected"), [(1.0, 8), (0.05, 5), (0.02, 2), (0.001, 1)])
def test_burst_is_no_longer_than_the_time_between_arrivals(gap_s: float, expected: int) -> None:
    clock = Clock()
    policy = BurstPolicy(8, clock)
    policy.took(0.02, 2)
    for _ in range(8):
        policy.arrived()
        clock.now_s += gap_s * 1.01
    assert steps(decoding(40), policy=policy) == expected
    clock.now_s += 60.0
    assert steps(decoding(40), policy=policy) == 8


def test_few_requests_at_once_do_not_count_as_frequent() -> None:
    policy = BurstPolicy(8, Clock())
    policy.took(0.02, 2)
    for _ in range(4):
        policy.arrived()
    assert steps(decoding(40), policy=policy) == 8


def recorded(*ids: int, max_tokens: int = 9) -> tuple[list[int], list[Any], int]:
    """Ids that count, events, tokens in the pool, of a burst with these ids behind a prompt of three."""
    item = sequence(3, max_tokens)
    item.status, item.computed, item.output_ids = Status.RUNNING, 3, [7]
    result = StepTokens([list(ids)], [[-0.5 * token for token in ids]])
    events = record(Work(item, 3, 4, True), result, 0, frozenset([2]))
    return item.output_ids, list(events), item.computed


def test_burst_counts_each_of_its_tokens() -> None:
    ids, (event,), computed = recorded(5, 6, 7)
    assert (ids, computed, event.ids, event.logprobs) == ([7, 5, 6, 7], 6, [5, 6, 7], [-2.5, -3.0, -3.5])
    assert (event.finish_reason, event.ends_with_eos) == (None, False)


@pytest.mark.parametrize(("ids", "taken"), [((5, 2, 7), [5, 2]), ((2, 5, 6), [2]), ((5, 6, 2), [5, 6, 2])])
def test_nothing_counts_behind_an_end_of_sequence(ids: tuple[int, ...], taken: list[int]) -> None:
    _, (event,), _ = recorded(*ids)
    assert (event.ids, event.finish_reason, event.ends_with_eos) == (taken, "stop", True)
    assert len(event.logprobs) == len(taken)


def test_last_token_that_was_asked_for_ends_the_answer() -> None:
    _, (event,), _ = recorded(5, 6, max_tokens=3)
    assert (event.ids, event.finish_reason) == ([5, 6], "length")


@pytest.mark.parametrize(("ids", "taken"), [((5, -1, 0), [5]), ((-1, 0, 0), [])])
def test_tokens_before_logits_that_are_not_finite_are_told(ids: tuple[int, ...], taken: list[int]) -> None:
    _, events, _ = recorded(*ids)
    assert [event.ids for event in events if isinstance(event, Tokens)] == ([taken] if taken else [])
    assert isinstance(events[-1], Failure)
    assert events[-1].error is NOT_FINITE


STAGES, ROWS, ROW_BYTES = 3, 4, 16


class Peers:
    """Stages that pass a number on, and add their own to it."""

    def __init__(self, failing: int | None = None, error: BaseException | None = None) -> None:
        self._failing, self._error = failing, error
        self._barrier = threading.Barrier(STAGES)
        self.given_up = 0

    def call(self, index: int, more: Mapping[str, Any]) -> dict[str, Any]:
        self._barrier.wait(20)  # all are called at once
        if index == self._failing and self._error is not None:
            raise self._error
        incoming, outgoing = ExchangeDoor(index, STAGES, ROW_BYTES).join(bytes(more["exchange"]).decode(), ROWS)
        value = torch.tensor([1])
        try:
            for step in range(int(more["decode_steps"][0])):
                value = incoming.receive(value.clone()) if index or step else value
                outgoing.send(value + index)
        except StageError as error:
            self.given_up += "was given up" in str(error)
            raise
        return {"value": value}


@pytest.fixture
def calls() -> Any:
    made = BurstCalls(STAGES, ROWS, ROW_BYTES)
    assert made.are_possible()
    yield made
    made.close()


def test_stages_run_a_burst_together(calls: BurstCalls) -> None:
    assert [int(calls.run(steps, Peers().call)["value"]) for steps in (2, 4)] == [5, 11]


@pytest.mark.parametrize("failing", range(STAGES))
def test_stage_that_fails_ends_the_burst_with_its_error(calls: BurstCalls, failing: int) -> None:
    peers = Peers(failing, StageError("the cause"))
    with pytest.raises(StageError, match="the cause"):
        calls.run(4, peers.call)
    assert peers.given_up == STAGES - 1
    assert int(calls.run(2, Peers().call)["value"]) == 5


@pytest.mark.parametrize("failing", range(STAGES))
def test_what_nobody_foresaw_ends_the_burst_too(calls: BurstCalls, failing: int) -> None:
    peers = Peers(failing, ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        calls.run(4, peers.call)
    assert peers.given_up == STAGES - 1


def test_without_shared_memory_there_are_no_bursts(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    def full(*_: object) -> None:
        tries.append(1)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Exchange, "create", full)
    made = BurstCalls(STAGES, ROWS, ROW_BYTES)
    assert [made.are_possible(), made.are_possible(), len(tries)] == [False, False, 1]


def test_one_stage_needs_no_exchange() -> None:
    seen: list[Mapping[str, Any]] = []

    def call(_index: int, more: Mapping[str, Any]) -> dict[str, Any]:
        seen.append(more)
        return {}

    made = BurstCalls(1, ROWS, ROW_BYTES)
    assert made.are_possible()
    made.run(4, call)
    assert [list(more) for more in seen] == [["decode_steps"]]


def test_memory_is_given_back() -> None:
    made = BurstCalls(STAGES, ROWS, ROW_BYTES)
    made.are_possible()
    exchange = made._exchange
    assert exchange is not None
    assert Path(exchange.path).exists()
    made.close()
    assert not Path(exchange.path).exists()
