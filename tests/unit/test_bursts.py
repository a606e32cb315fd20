"""How long a burst may be, and what becomes of its tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from deepstack_serving.engine.block_allocator import BlockAllocator
from deepstack_serving.engine.burst_policy import LONGEST_S, STEPS_WITH_ALTERNATIVES, BurstPolicy
from deepstack_serving.engine.events import Failure, Tokens
from deepstack_serving.engine.inbox import Inbox
from deepstack_serving.engine.pipeline import StepTokens
from deepstack_serving.engine.progress import NOT_FINITE, record
from deepstack_serving.engine.scheduler import Scheduler, Work
from deepstack_serving.engine.sequence import Status
from deepstack_serving.exchange import MAX_DECODE_STEPS
from deepstack_serving.stages.info import StageInfo
from tests.support.sequences import advance, sequence

ON_CPU = (StageInfo("language", "", "FP32", "cpu", ""),)
ON_GPUS = tuple(StageInfo("language", "", "FP32", f"cuda:{index}", "") for index in range(2))


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def decoding(*max_tokens: int, waiting: int = 16, running: int = 8) -> Scheduler:
    """A scheduler whose sequences have computed their prompts."""
    made = Scheduler(BlockAllocator(400, 4), running, waiting, 100)
    for count in max_tokens:
        made.add(sequence(3, count))
    made.admit()
    advance(made)
    return made


def steps(made: Scheduler, setting: int = 8) -> int:
    return BurstPolicy(setting, Inbox()).steps(made.plan(), ON_CPU)


def test_burst_is_as_long_as_the_setting_says() -> None:
    assert [steps(decoding(40, 50), setting) for setting in (1, 4, 8)] == [1, 4, 8]


def test_automatic_bursts_are_for_gpus() -> None:
    made, policy = decoding(200), BurstPolicy(0, Inbox())
    mixed = (*ON_CPU, *ON_GPUS)
    assert [policy.steps(made.plan(), infos) for infos in (ON_CPU, mixed, ON_GPUS)] == [1, 1, MAX_DECODE_STEPS]


@pytest.mark.parametrize(("left", "expected"), [(1, 1), (2, 2), (7, 7), (9, 8)])
def test_burst_ends_with_the_first_answer_that_is_full(left: int, expected: int) -> None:
    assert steps(decoding(left + 1, 40)) == expected


def test_no_burst_beside_a_prompt() -> None:
    made = decoding(40)
    made.add(sequence(5, 40))
    made.admit()
    assert steps(made) == 1


def test_bursts_go_on_while_images_are_encoded_and_requests_wait() -> None:
    made = decoding(40, running=2)
    made.add(sequence(5, 40, files=(b"image",)))
    made.add(sequence(5, 40))
    made.admit()
    assert (len(made.running), len(made.waiting), steps(made)) == (2, 1, 8)


def begun(made: Scheduler, inbox: Inbox, clock: Clock) -> tuple[BurstPolicy, list[Work]]:
    policy, work = BurstPolicy(8, inbox, clock), made.plan()
    assert policy.steps(work, ON_CPU) > 1
    made.depart(0, work)
    return policy, work


def test_burst_ends_when_another_can_run() -> None:
    made = decoding(40)
    policy, work = begun(made, Inbox(), Clock())
    image = sequence(5, 40, files=(b"image",))
    made.add(image)
    made.admit()
    assert not policy.must_end(made, 0, len(work))  # its image is being encoded
    image.status = Status.RUNNING
    assert policy.must_end(made, 0, len(work))
    made.finish(image)
    assert not policy.must_end(made, 0, len(work))
    made.add(sequence(5, 40))
    made.admit()
    assert policy.must_end(made, 0, len(work))


def test_burst_ends_when_the_engine_does() -> None:
    made, inbox = decoding(40), Inbox()
    policy, work = begun(made, inbox, Clock())
    assert not policy.must_end(made, 0, len(work))
    inbox.close()
    assert policy.must_end(made, 0, len(work))


def test_bursts_are_short_when_alternatives_wait_for_their_end() -> None:
    made = decoding(200, 200)
    work = made.plan()
    sampling = replace(work[0].sequence.request.sampling, logprobs=2)
    work[0].sequence.request = replace(work[0].sequence.request, sampling=sampling)
    assert BurstPolicy(64, Inbox()).steps(work, ON_CPU) == STEPS_WITH_ALTERNATIVES


def test_burst_ends_after_a_while() -> None:
    made, clock = decoding(40), Clock()
    policy, work = begun(made, Inbox(), clock)
    clock.now_s += LONGEST_S * 1.01
    assert policy.must_end(made, 0, len(work))


@pytest.mark.parametrize(("waiting", "ended", "expected"), [(0, 1, False), (0, 2, True), (1, 0, False), (1, 1, True)])
def test_burst_ends_when_others_could_take_a_place(waiting: int, ended: int, expected: bool) -> None:
    made = decoding(*[40] * 16, running=16)
    for _ in range(waiting):
        made.add(sequence(3, 40))
    policy, work = begun(made, Inbox(), Clock())
    assert policy.must_end(made, ended, len(work)) is expected


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
