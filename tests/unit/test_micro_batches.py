"""Groups of sequences whose steps overlap: who belongs where, and whose blocks may not be given back yet."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deepstack_serving.engine.block_allocator import BlockAllocator
from deepstack_serving.engine.scheduler import Scheduler, Work
from deepstack_serving.engine.sequence import Status
from deepstack_serving.errors import CancelledError, StageError
from deepstack_serving.stages.info import StageInfo
from tests.support.asking import TEXT, Answer, answer, ask_alone, ask_together, submit
from tests.support.local import Change, LocalServer, keep, local_settings
from tests.support.sequences import sequence


def scheduler(count: int, groups: int = 2, max_tokens: int = 4) -> Scheduler:
    """Sequences of three prompt tokens."""
    made = Scheduler(BlockAllocator(100, 4), 50, 50, 8)
    made.set_groups(groups)
    for _ in range(count):
        made.add(sequence(3, max_tokens))
    made.admit()
    return made


def sizes(made: Scheduler) -> list[int]:
    counted = Counter(item.group for item in made.running)
    return [counted[group] for group in range(made.groups)]


def depart(made: Scheduler, group: int) -> list[Work]:
    work = made.plan(group)
    made.depart(group, work)
    return work


@pytest.mark.parametrize(("groups", "expected"), [(1, [5]), (2, [3, 2]), (3, [2, 2, 1])])
def test_requests_are_spread_over_the_groups(groups: int, expected: list[int]) -> None:
    assert sizes(scheduler(5, groups)) == expected


def test_prompts_of_each_group_have_a_budget_of_their_own() -> None:
    made = scheduler(8)
    assert [sum(item.end - item.start for item in made.plan(group)) for group in (0, 1)] == [8, 8]


def test_groups_have_no_sequence_in_common() -> None:
    made = scheduler(5)
    first, second = depart(made, 0), depart(made, 1)
    assert {item.sequence for item in first}.isdisjoint(item.sequence for item in second)


def test_group_whose_step_runs_is_not_planned() -> None:
    made = scheduler(2)
    work = depart(made, 0)
    assert (made.free_groups(), made.has_work) == ([1], True)
    depart(made, 1)
    assert (made.free_groups(), made.has_work) == ([], False)
    made.arrive(0, work)
    assert (made.free_groups(), made.has_work) == ([0], True)


def test_sequence_that_joins_a_group_whose_step_runs_waits_for_it() -> None:
    made = scheduler(1, groups=1)
    depart(made, 0)
    made.add(sequence(3, 4))
    made.admit()
    assert not made.has_work


def test_blocks_of_one_that_ends_while_its_step_runs_come_back_after_it() -> None:
    made = scheduler(2)
    work = depart(made, 0)
    (item,) = work
    made.finish(item.sequence)
    assert (item.sequence.status, made.allocator.free) == (Status.FINISHED, 96)
    made.finish(item.sequence)
    made.arrive(0, work)
    assert (item.sequence.blocks, made.allocator.free) == ([], 98)


def test_groups_are_evened_out() -> None:
    made = scheduler(8)
    for item in [item for item in made.running if item.group == 1]:
        made.finish(item)
    assert sizes(made) == [4, 0]
    made.balance(1)
    assert sizes(made) == [4, 0]
    made.balance(0)
    assert sizes(made) == [2, 2]


def test_sequence_in_a_step_is_in_no_second_one_when_the_groups_change() -> None:
    made = scheduler(4)
    work = depart(made, 0)
    made.set_groups(3)
    planned = [item.sequence for group in made.free_groups() for item in made.plan(group)]
    assert set(planned).isdisjoint(item.sequence for item in work)


@pytest.fixture(scope="module")
def solo(checkpoint: Path) -> Answer:
    with LocalServer(local_settings(checkpoint), held=True) as server:
        return ask_alone(server, [TEXT])[0]


def server_of(checkpoint: Path, change: Change = keep, **settings: object) -> LocalServer:
    return LocalServer(local_settings(checkpoint, micro_batches=2, **settings), 2, change, held=True)


def test_step_beside_the_engine_that_fails_is_made_up_for(checkpoint: Path, solo: Answer) -> None:
    failures = [StageError("once"), StageError("twice")]

    def fail(_model: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name == "next_ids" and failures:
            raise failures.pop()
        return tensor

    with server_of(checkpoint, fail) as server:
        answers = ask_together(server, [TEXT] * 5)
    assert [item.ids for item in answers] == [solo.ids] * 5


def test_groups_are_for_prompts_and_bursts_for_what_decodes(checkpoint: Path, solo: Answer) -> None:
    with server_of(checkpoint, decode_steps_per_call=4, prefill_token_budget=16) as server:
        answers = ask_together(server, [TEXT] * 5, max_tokens=20)
        bursts = [steps > 1 for name, steps in server.port.steps if name == "language_late"]
        again = ask_alone(server, [TEXT])
    assert [item.ids[:8] for item in (*answers, *again)] == [solo.ids] * 6
    assert bursts.index(True) >= 5  # as long as a prompt was left
    assert bursts.count(False) < 5 * 20


def test_stage_that_was_restarted_ends_the_steps_of_all_groups(checkpoint: Path, solo: Answer) -> None:
    failed = threading.Event()

    def restart(model: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if model == "language_late" and name == "next_ids" and not failed.is_set():
            failed.set()
            raise StageError("the stage is gone")
        if model == "language_late" and name == "stage_info" and failed.is_set():
            return replace(StageInfo.from_bytes(bytes(tensor.tolist())), instance="another process").to_tensor()
        return tensor

    with server_of(checkpoint, restart) as server:
        replies = [submit(server, TEXT, max_tokens=60) for _ in range(4)]
        server.start()
        assert {str(reply.wait().error) for reply in replies} == {"the stage is gone"}
        assert ask_alone(server, [TEXT])[0] == solo


def test_clients_that_leave_give_their_blocks_back(checkpoint: Path, solo: Answer) -> None:
    with server_of(checkpoint, kv_pool_tokens=512) as server:
        replies = [submit(server, TEXT, max_tokens=100) for _ in range(4)]
        replies[1].cancelled = replies[2].cancelled = True
        server.start()
        assert [type(reply.wait().error) for reply in replies[1:3]] == [CancelledError] * 2
        assert [answer(reply).ids[:8] for reply in replies[::3]] == [solo.ids] * 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_fault_that_nobody_foresaw_beside_the_engine_ends_every_request(checkpoint: Path) -> None:
    def fault(_model: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name == "next_ids":
            raise ZeroDivisionError
        return tensor

    with server_of(checkpoint, fault) as server:
        replies = [submit(server, TEXT) for _ in range(3)]
        server.start()
        assert ["has failed" in str(reply.wait().error) for reply in replies] == [True] * 3
