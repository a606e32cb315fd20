"""Messages between stages through shared memory: they arrive whole and in order, and nobody waits for ever."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from deepstack_serving.errors import StageError, WireError
from deepstack_serving.exchange import (
    MAX_DECODE_STEPS,
    Exchange,
    ExchangeDoor,
    Link,
    LinkSize,
    link_sizes,
    links,
    region,
)
from deepstack_serving.regions import region_prefix

ROWS, WIDTH = 4, 6
ROW_BYTES = WIDTH * 2


@pytest.fixture
def exchange(tmp_path: Path) -> Iterator[Exchange]:
    """Of two stages."""
    made = Exchange.create(link_sizes(2, ROWS, ROWS, ROW_BYTES), tmp_path)
    yield made
    made.close()
    assert list(tmp_path.iterdir()) == []


def door(folder: Path, index: int) -> ExchangeDoor:
    return ExchangeDoor(index, 2, ROW_BYTES, folder)


def hidden(seed: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)).bfloat16()


def waiting(link: Link, act: Callable[[], object]) -> BaseException | None:
    """What a receiver that waits already ends with after `act`."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(link.receive, hidden(0), 20.0)
        act()
        return future.exception()


def ends(folder: Path, index: int, ticket: str) -> tuple[Link, Link]:
    links = door(folder, index).join(ticket, ROWS)
    return links.incoming, links.outgoing


def received(link: Link, target: torch.Tensor) -> torch.Tensor:
    assert link.receive(target)
    return target


def test_two_stages_exchange_hidden_states_and_tokens(exchange: Exchange, tmp_path: Path) -> None:
    ticket, steps = exchange.begin(), 20
    tokens = [torch.arange(ROWS) + step for step in range(steps)]

    def first() -> list[list[int]]:
        incoming, outgoing = ends(tmp_path, 0, ticket)
        answers = []
        for step in range(steps):
            outgoing.send(hidden(step))
            answers.append(received(incoming, torch.empty(ROWS, dtype=torch.int64)).tolist())
        return answers

    incoming, outgoing = ends(tmp_path, 1, ticket)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(first)
        for step in range(steps):
            assert torch.equal(received(incoming, torch.empty_like(hidden(0))), hidden(step))
            outgoing.send(tokens[step])
        assert future.result() == [item.tolist() for item in tokens]
    assert [item.tolist() for item in outgoing.sent(tokens[0])] == [item.tolist() for item in tokens]


def test_tokens_of_all_steps_stay_in_their_places(exchange: Exchange, tmp_path: Path) -> None:
    exchange.begin()
    _, outgoing = ends(tmp_path, 1, exchange.begin())
    expected = [torch.arange(ROWS) * step for step in range(MAX_DECODE_STEPS)]
    for tokens in expected:
        outgoing.send(tokens)
    assert torch.equal(torch.stack(outgoing.sent(expected[0])), torch.stack(expected))


def test_receiver_is_told_that_nothing_follows(exchange: Exchange, tmp_path: Path) -> None:
    ticket = exchange.begin()
    incoming, outgoing = ends(tmp_path, 1, ticket)[0], ends(tmp_path, 0, ticket)[1]
    outgoing.send(hidden(1))
    assert torch.equal(received(incoming, torch.empty_like(hidden(0))), hidden(1))
    outgoing.send_end()
    assert not incoming.receive(torch.empty_like(hidden(0)))


def test_burst_that_ends_early_is_that_one_alone(exchange: Exchange, tmp_path: Path) -> None:
    links = door(tmp_path, 0).join(exchange.begin(), ROWS)
    assert not links.is_ending
    exchange.end_early()
    assert links.is_ending
    assert not door(tmp_path, 0).join(exchange.begin(), ROWS).is_ending


PEER = """
import sys
from pathlib import Path
import torch
from deepstack_serving.exchange import ExchangeDoor
links = ExchangeDoor(1, 2, 12, Path(sys.argv[1])).join(sys.argv[2], 4)
rows = torch.empty(4, 6, dtype=torch.bfloat16)
for _ in range(3):
    assert links.incoming.receive(rows)
    links.outgoing.send(rows.sum(1).long())
"""


def test_another_process_answers(exchange: Exchange, tmp_path: Path) -> None:
    ticket = exchange.begin()
    incoming, outgoing = ends(tmp_path, 0, ticket)
    with subprocess.Popen([sys.executable, "-c", PEER, str(tmp_path), ticket]) as process:
        for step in range(3):
            outgoing.send(hidden(step))
            sums = received(incoming, torch.empty(ROWS, dtype=torch.int64))
            assert sums.tolist() == hidden(step).sum(1).long().tolist()
        assert process.wait(60) == 0


def test_abort_frees_a_stage_that_waits(exchange: Exchange, tmp_path: Path) -> None:
    incoming, outgoing = ends(tmp_path, 1, exchange.begin())
    assert "another stage failed" in str(waiting(incoming, exchange.abort))
    with pytest.raises(StageError, match="another stage failed"):
        outgoing.send(torch.arange(ROWS))


def test_abort_is_over_with_the_next_burst(exchange: Exchange, tmp_path: Path) -> None:
    exchange.begin()
    exchange.abort()
    ticket = exchange.begin()
    ends(tmp_path, 0, ticket)[1].send(hidden(1))
    incoming, _ = ends(tmp_path, 1, ticket)
    assert torch.equal(received(incoming, torch.empty_like(hidden(0))), hidden(1))


def test_stage_that_is_late_cannot_touch_the_next_burst(exchange: Exchange, tmp_path: Path) -> None:
    (incoming, _), (_, outgoing) = (ends(tmp_path, index, exchange.begin()) for index in (1, 0))
    error = waiting(incoming, exchange.begin)
    assert "is over" in str(error)
    with pytest.raises(StageError, match="burst 2 is over, 3 has begun"):
        outgoing.send(hidden(0))
    assert not exchange.bytes[region._PAGE_BYTES :].any()


def test_message_of_an_earlier_burst_is_not_received(exchange: Exchange, tmp_path: Path) -> None:
    ends(tmp_path, 0, exchange.begin())[1].send(hidden(1))
    incoming, _ = ends(tmp_path, 1, exchange.begin())
    with pytest.raises(StageError, match=r"nothing came over link 0 within 0\.01 s"):
        incoming.receive(hidden(0), 0.01)


def test_message_of_another_size_is_refused(exchange: Exchange, tmp_path: Path) -> None:
    ticket = exchange.begin()
    ends(tmp_path, 0, ticket)[1].send(hidden(1)[:2])
    with pytest.raises(StageError, match="holds 24 bytes, 48 were expected"):
        ends(tmp_path, 1, ticket)[0].receive(hidden(0))


def test_messages_that_were_not_waited_for_are_a_fault(exchange: Exchange, tmp_path: Path) -> None:
    ticket = exchange.begin()
    _, outgoing = ends(tmp_path, 0, ticket)
    outgoing.send(hidden(1))
    outgoing.send(hidden(2))
    with pytest.raises(StageError, match="does not expect"):
        ends(tmp_path, 1, ticket)[0].receive(hidden(0))


@pytest.fixture
def ended_process_id() -> int:
    with subprocess.Popen([sys.executable, "-S", "-c", ""]) as process:
        process.wait()
    return process.pid


def orphan(made: Exchange, process_id: int) -> Path:
    """The region as a process that has ended would have left it."""
    return made.path.rename(made.path.with_name(f"{region_prefix(process_id)}exchange_00"))


def test_stage_does_not_wait_for_a_dead_orchestrator(
    exchange: Exchange, tmp_path: Path, ended_process_id: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "_CHECK_INTERVAL_S", 0.0)
    exchange.begin()
    path = orphan(exchange, ended_process_id)
    incoming, _ = ends(tmp_path, 1, f"{path.name}:1")
    with pytest.raises(StageError, match="orchestrator that began this burst is gone"):
        incoming.receive(hidden(0))
    path.unlink()


def test_what_a_dead_orchestrator_left_is_swept(exchange: Exchange, tmp_path: Path, ended_process_id: int) -> None:
    left = orphan(exchange, ended_process_id)
    other = Exchange.create([LinkSize(8)], tmp_path)
    assert (left.exists(), other.path.exists()) == (False, True)
    other.close()


def test_no_memory_leaves_no_region(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        Exchange.create([LinkSize(8)], tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "ticket",
    [
        *("", "deepstack_1_2_exchange_ab", "../deepstack_1_2_exchange_ab:1", "deepstack_1_2_exchange_ab:1\n"),
        *(f"deepstack_1_2_exchange_ab:{'9' * 5000}", "deepstack_1_2_exchange_ab:\u0661"),
    ],
)
def test_ticket_that_is_none_is_refused(exchange: Exchange, tmp_path: Path, ticket: str) -> None:
    with pytest.raises(WireError, match=r"'exchange' is .*; allowed: "):
        door(tmp_path, 0).join(ticket, ROWS)


def test_exchange_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WireError, match="cannot be opened"):
        door(tmp_path, 0).join("deepstack_1_2_exchange_ab:1", ROWS)


@pytest.mark.parametrize("content", [b"", bytes(7), bytes(8192)])
def test_region_that_is_no_exchange_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "deepstack_1_2_exchange_ab").write_bytes(content)
    with pytest.raises(WireError, match=r"cannot be opened|no exchange of this version"):
        door(tmp_path, 0).join("deepstack_1_2_exchange_ab:1", ROWS)


def test_exchange_of_another_split_is_refused(exchange: Exchange, tmp_path: Path) -> None:
    with pytest.raises(WireError, match="one of 3 links; 3 stages have 4"):
        ExchangeDoor(0, 3, ROW_BYTES, tmp_path).join(exchange.begin(), ROWS)


@pytest.mark.parametrize("index", [0, 1])
def test_more_rows_than_the_links_hold_are_refused(exchange: Exchange, tmp_path: Path, index: int) -> None:
    with pytest.raises(WireError, match="too small for 5 rows"):
        door(tmp_path, index).join(exchange.begin(), ROWS + 1)


def test_stage_keeps_the_exchanges_that_are_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "MOST_OPEN", 3)
    made = [Exchange.create(link_sizes(2, ROWS, ROWS, ROW_BYTES), tmp_path) for _ in range(5)]
    stage = door(tmp_path, 0)

    def opened(number: int) -> Exchange:
        return stage.join(made[number].begin(), ROWS).exchange

    first, second = opened(0), opened(1)
    assert (opened(0), opened(1)) == (first, second)
    made[0].close()
    assert opened(0) is first  # a call that was on its way
    third = opened(2)
    assert (opened(1), opened(2)) == (second, third)
    with pytest.raises(WireError, match="cannot be opened"):
        opened(0)
    opened(3)
    opened(4)  # the oldest goes
    assert opened(2) is third
    assert opened(1) is not second
    for exchange in made[1:]:
        exchange.close()
