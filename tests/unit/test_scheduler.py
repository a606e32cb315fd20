"""First come, first served by free blocks; one step's work under the token budget; every block comes back."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from deepstack_serving.engine.block_allocator import BlockAllocator
from deepstack_serving.engine.scheduler import Scheduler
from deepstack_serving.engine.sequence import EncodedBatch, Features, Sequence, Status
from deepstack_serving.errors import InvalidRequestError, UnavailableError
from deepstack_serving.families.base import Positions
from tests.support.sequences import advance, sequence


def scheduler(blocks: int = 8, block_size: int = 4, running: int = 8, waiting: int = 8, budget: int = 100) -> Scheduler:
    return Scheduler(BlockAllocator(blocks, block_size), running, waiting, budget)


def admitted(made: Scheduler, *sequences: Sequence) -> list[Sequence]:
    """They come one after the other; those that got in."""
    running = []
    for item in sequences:
        made.add(item)
        running += made.admit()
    return running


def test_request_reserves_blocks_for_prompt_and_answer() -> None:
    made, item = scheduler(), sequence(5, max_tokens=4)
    admitted(made, item)
    assert (len(item.blocks), item.block_table.tolist(), made.allocator.free) == (3, item.blocks, 5)


def test_admission_is_in_order_of_arrival() -> None:
    first, second, third = sequence(20), sequence(20), sequence(3)
    made = scheduler()
    assert admitted(made, first, second, third) == [first]  # the third would fit, but is not served before the second
    made.finish(first)
    assert made.admit() == [second, third]


def test_running_requests_are_limited() -> None:
    items = [sequence(1) for _ in range(3)]
    assert admitted(scheduler(running=2), *items) == items[:2]


def test_request_larger_than_the_pool_is_refused_with_both_sizes() -> None:
    with pytest.raises(InvalidRequestError, match="come to 33 tokens, the whole KV pool holds 32"):
        scheduler().add(sequence(30, max_tokens=3))


def test_request_of_exactly_the_pool_is_admitted() -> None:
    item = sequence(30, max_tokens=2)
    assert admitted(scheduler(), item) == [item]


def test_full_queue_refuses_more() -> None:
    made = scheduler(running=1, waiting=2)
    admitted(made, *(sequence(1) for _ in range(3)))
    with pytest.raises(UnavailableError, match="2 requests are waiting already"):
        made.add(sequence(1))


def test_queue_is_bounded_while_blocks_are_short() -> None:
    made = scheduler(waiting=2)
    admitted(made, sequence(30), sequence(30), sequence(30))
    with pytest.raises(UnavailableError, match="2 requests are waiting already"):
        made.add(sequence(30))


def test_queue_of_length_zero_still_serves() -> None:
    item = sequence(1)
    assert admitted(scheduler(waiting=0), item) == [item]


def test_prompts_share_the_budget_oldest_first() -> None:
    made = scheduler(budget=10)
    first, second, third = items = [sequence(6), sequence(6), sequence(6)]
    admitted(made, *items)
    assert advance(made) == [(first, 0, 6), (second, 0, 4)]
    assert advance(made) == [(second, 4, 6), (third, 0, 6)]


def test_decoding_goes_before_prompts() -> None:
    made = scheduler(budget=5)
    old, new = sequence(3, max_tokens=5), sequence(9)
    admitted(made, old)
    advance(made)
    admitted(made, new)
    assert advance(made) == [(old, 3, 4), (new, 0, 4)]
    assert advance(made) == [(old, 4, 5), (new, 4, 8)]


@pytest.mark.parametrize("budget", [1, 2, 7])
def test_every_step_stays_within_the_budget_and_every_prompt_is_computed_once(budget: int) -> None:
    made = scheduler(blocks=40, budget=budget)
    items = [sequence(size) for size in (9, 1, 13, 6)]
    admitted(made, *items)
    covered: dict[Sequence, list[int]] = {item: [] for item in items}
    while not made.is_idle:
        step = advance(made)
        assert sum(end - start for _, start, end in step) <= budget
        for item, start, end in step:
            covered[item] += range(start, end)
    assert [covered[item] for item in items] == [list(range(item.prompt.length)) for item in items]


def test_request_whose_images_are_being_encoded_is_not_planned() -> None:
    made, item = scheduler(), sequence(3, files=(b"image",))
    admitted(made, item)
    assert (item.status, made.plan(), made.has_work) == (Status.ENCODING, [], False)


@pytest.mark.parametrize("place", [0, 1])
def test_finished_request_gives_everything_back_once(place: int) -> None:
    made = scheduler(running=1)
    items = [sequence(3), sequence(3)]
    admitted(made, *items)
    made.finish(items[place])
    made.finish(items[place])
    assert (items[place].status, items[place].blocks) == (Status.FINISHED, [])
    assert len(made.waiting) + len(made.running) == 1


def test_random_arrivals_and_ends_conserve_the_blocks() -> None:
    chance, made = random.Random(0), scheduler(blocks=20, running=5, waiting=100, budget=9)
    open_requests: list[Sequence] = []
    for _ in range(500):
        if chance.random() < 0.5 and len(made.waiting) < 50:
            open_requests.append(sequence(chance.randint(1, 40), chance.randint(1, 20)))
            made.add(open_requests[-1])
        made.admit()
        advance(made)
        if open_requests and chance.random() < 0.2:
            made.finish(open_requests.pop(chance.randrange(len(open_requests))))
        held = [block for item in made.running for block in item.blocks]
        assert len(held) == len(set(held)) == 20 - made.allocator.free
    for item in [*made.waiting, *made.running]:
        made.finish(item)
    made.allocator.check(idle=True)
    assert made.is_idle


def test_allocator_hands_out_the_lowest_numbers() -> None:
    made = BlockAllocator(6, 4)
    first = made.allocate(3)
    made.release([first[1]])
    assert (first, made.allocate(2)) == ([0, 1, 2], [1, 3])


def test_allocator_refuses_more_than_is_free_and_keeps_what_it_has() -> None:
    made = BlockAllocator(2, 4)
    with pytest.raises(RuntimeError, match="3 blocks were asked for, 2 are free"):
        made.allocate(3)
    assert made.free == 2


@pytest.mark.parametrize("block", [1, 7])
def test_allocator_refuses_a_block_that_is_not_in_use(block: int) -> None:
    made = BlockAllocator(2, 4)
    made.allocate(1)
    with pytest.raises(RuntimeError, match=f"block {block} was released but is not in use"):
        made.release([block])


def test_allocator_finds_a_leak_when_idle() -> None:
    made = BlockAllocator(2, 4)
    made.allocate(1)
    made.check(idle=False)
    with pytest.raises(RuntimeError, match="blocks leak"):
        made.check(idle=True)


def test_allocator_is_not_resized_under_running_requests() -> None:
    made = BlockAllocator(2, 4)
    made.allocate(1)
    with pytest.raises(RuntimeError, match="changed from 2 to 3 blocks while 1 are in use"):
        made.resize(3)


def with_features(joinable: bool, tokens: int = 10) -> Sequence:
    """A request whose tokens 2 to 5 are those of an image, encoded."""
    item = sequence(tokens)
    rows = np.arange(2, 6)
    item.prompt = replace(item.prompt, image_rows=rows, feature_rows=rows - 2, image_tokens=(4,))
    positions = Positions(np.zeros((1, tokens), dtype=np.int64), 0)
    item.features = Features(EncodedBatch({}, 4, joinable), 0, positions)
    return item


def planned(made: Scheduler) -> list[Sequence]:
    return [computed[0] for computed in advance(made)]


def test_features_on_the_host_share_a_step() -> None:
    items = [with_features(joinable=True) for _ in range(2)]
    made = scheduler(blocks=32)
    admitted(made, *items)
    assert planned(made) == items


@pytest.mark.parametrize("joinable", [(False, False), (False, True), (True, False)])
def test_features_on_a_gpu_share_a_step_with_text_only(joinable: tuple[bool, bool]) -> None:
    first, second = (with_features(each) for each in joinable)
    text = sequence(10)
    made = scheduler(blocks=32)
    admitted(made, first, second, text)
    assert [planned(made), planned(made), planned(made)] == [[first, text], [second], []]


def test_chunk_before_the_image_goes_beside_features_on_a_gpu() -> None:
    first, second = with_features(joinable=False), with_features(joinable=False)
    made = scheduler(blocks=32, budget=12)
    admitted(made, first, second)
    assert advance(made) == [(first, 0, 10), (second, 0, 2)]
    assert advance(made) == [(second, 2, 10)]
