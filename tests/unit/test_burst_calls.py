"""Calls of all stages at once: over shared memory of their own, together to their end, whatever fails."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from deepstack_serving.engine import burst_calls
from deepstack_serving.engine.burst_calls import BurstCalls
from deepstack_serving.errors import StageError
from deepstack_serving.exchange import MAX_DECODE_STEPS, BurstLinks, Exchange, ExchangeDoor, LinkSize

STAGES, ROWS, ROW_BYTES = 3, 4, 16
NO_LOGPROBS = torch.zeros(1)


class Peers:
    """Stages that pass a number on, and add their own to it."""

    def __init__(self, failing: int | None = None, error: BaseException | None = None) -> None:
        self._failing, self._error = failing, error
        self._barrier = threading.Barrier(STAGES)
        self.given_up = 0
        self.gate = threading.Semaphore(MAX_DECODE_STEPS)

    def call(self, index: int, more: Mapping[str, Any]) -> dict[str, Any]:
        self._barrier.wait(20)  # all are called at once
        if index == self._failing and self._error is not None:
            raise self._error
        links = ExchangeDoor(index, STAGES, ROW_BYTES).join(bytes(more["exchange"]).decode(), ROWS)
        try:
            return {"value": self._run(index, int(more["decode_steps"][0]), links)}
        except StageError as error:
            self.given_up += "was given up" in str(error)
            raise

    def _run(self, index: int, steps: int, links: BurstLinks) -> torch.Tensor:
        value = torch.tensor([1])
        for step in range(steps):
            if (index or step) and not links.incoming.receive(value):
                if index < STAGES - 1:
                    links.outgoing.send_end()
                return value
            if index == 0:
                assert self.gate.acquire(timeout=20)
                if links.is_ending:
                    links.outgoing.send_end()
                    return value
            if index == STAGES - 1:
                links.logprobs.send(NO_LOGPROBS - step)
            links.outgoing.send(value + index)
        return value


def value_of(calls: BurstCalls, steps: int, peers: Peers) -> int:
    return int(calls.begin(steps, 1, peers.call).result()["value"])


@pytest.fixture
def calls() -> Any:
    made = BurstCalls(STAGES, ROWS, ROWS, ROW_BYTES)
    assert made.are_possible()
    yield made
    made.close()


def test_stages_run_a_burst_together(calls: BurstCalls) -> None:
    assert [value_of(calls, steps, Peers()) for steps in (2, 4)] == [5, 11]


def test_tokens_can_be_taken_as_they_come(calls: BurstCalls) -> None:
    value_of(calls, 4, Peers())
    peers = Peers()
    peers.gate = threading.Semaphore(2)
    burst = calls.begin(4, 1, peers.call)
    while burst.steps < 2:
        assert not burst.is_over(0.001)
    assert burst.tokens(0, 2) == ([[4, 7]], [[0.0, -1.0]])
    assert not burst.is_over(0.0)
    peers.gate.release(2)
    assert burst.is_over()
    assert (burst.steps, burst.tokens(2, 4)) == (4, ([[10, 13]], [[-2.0, -3.0]]))


def test_burst_that_is_ended_early_has_run_whole_steps(calls: BurstCalls) -> None:
    peers = Peers()
    peers.gate = threading.Semaphore(2)
    burst = calls.begin(4, 1, peers.call)
    while burst.steps < 2:
        assert not burst.is_over(0.001)
    burst.end_early()
    peers.gate.release()
    assert burst.is_over()
    burst.result()
    assert (burst.steps, burst.tokens(0, 2)) == (2, ([[4, 7]], [[0.0, -1.0]]))
    assert value_of(calls, 2, Peers()) == 5


@pytest.mark.parametrize("failing", range(STAGES))
def test_stage_that_fails_ends_the_burst_with_its_error(calls: BurstCalls, failing: int) -> None:
    peers = Peers(failing, StageError("the cause"))
    burst = calls.begin(4, 1, peers.call)
    burst.wait_until_called()
    with pytest.raises(StageError, match="the cause"):
        burst.result()
    assert peers.given_up == STAGES - 1
    assert value_of(calls, 2, Peers()) == 5


@pytest.mark.parametrize("failing", range(STAGES))
def test_what_nobody_foresaw_ends_the_burst_too(calls: BurstCalls, failing: int) -> None:
    peers = Peers(failing, ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        calls.begin(4, 1, peers.call).result()
    assert peers.given_up == STAGES - 1


def test_without_shared_memory_there_are_no_bursts(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    def full(*_: object) -> None:
        tries.append(1)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Exchange, "create", full)
    made = BurstCalls(STAGES, 10 * ROWS, ROWS, ROW_BYTES)
    assert [made.are_possible(), made.are_possible(), len(tries)] == [
        False,
        False,
        2,
    ]  # for prompts, and for decode steps
    monkeypatch.undo()
    assert not made.are_possible()
    made._retry_s = 0.0
    assert made.are_possible()
    made.close()


def test_where_prompts_do_not_fit_decode_steps_still_do(monkeypatch: pytest.MonkeyPatch) -> None:
    create = Exchange.create

    def small(sizes: list[LinkSize]) -> Exchange:
        if sizes[0].capacity > ROWS * ROW_BYTES:
            raise OSError(28, "No space left on device")
        return create(sizes)

    monkeypatch.setattr(Exchange, "create", small)
    made = BurstCalls(STAGES, 10 * ROWS, ROWS, ROW_BYTES)
    assert made.are_possible()
    assert made.max_rows == ROWS
    assert value_of(made, 2, Peers()) == 5
    made.close()


@pytest.mark.parametrize(("wanted", "rows"), [(ROWS, ROWS), (10 * ROWS, 10 * ROWS), (10**9, 64)])
def test_links_hold_the_rows_of_a_step_within_bounds(wanted: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(burst_calls, "MOST_LINK_BYTES", 64 * ROW_BYTES)
    made = BurstCalls(STAGES, wanted, ROWS, ROW_BYTES)
    assert made.are_possible()
    assert made.max_rows == rows
    made.close()


def test_bursts_that_keep_failing_get_other_memory(calls: BurstCalls) -> None:
    first = calls._exchange
    for error in (StageError("1"), StageError("2"), None, StageError("1"), StageError("2")):
        calls.ended(error)
    assert calls._exchange is first
    calls.ended(StageError("3"))
    assert calls.are_possible()
    assert calls._exchange is not first is not None
    assert value_of(calls, 2, Peers()) == 5


def test_memory_is_given_back() -> None:
    made = BurstCalls(STAGES, ROWS, ROWS, ROW_BYTES)
    made.are_possible()
    exchange = made._exchange
    assert exchange is not None
    assert Path(exchange.path).exists()
    made.close()
    assert not Path(exchange.path).exists()
