"""An answer does not depend on what else is being answered: batches, orders, seeds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.asking import MIXED, Answer, Ask, answer, ask_alone, ask_together, picture, submit
from tests.support.local import LocalServer, local_settings

# Matrix products over other numbers of rows round differently in the last bits.
TOLERANCE = 1e-5
EIGHT = (
    *MIXED,
    Ask("what is shown in this picture?", (picture(70, 100, 5),)),
    Ask("0123456789 " * 12),
    Ask("a"),
    Ask("describe the image", (picture(128, 64, 6), picture(64, 96, 7))),
    Ask("describe the image", (picture(100, 70, 8),)),
)
# What is tested here is the engine's: one family stands for all.
pytestmark = pytest.mark.parametrize("checkpoint", ["qwen3_vl"], indirect=True, scope="session")
SAMPLED = {"temperature": 1.2, "top_k": 100, "top_p": 0.95, "min_p": 0.01}


@pytest.fixture(scope="module")
def solo(checkpoint: Path) -> list[Answer]:
    with LocalServer(local_settings(checkpoint)) as server:
        return ask_alone(server, EIGHT)


def test_eight_concurrent_requests_equal_their_solo_runs(checkpoint: Path, solo: list[Answer]) -> None:
    with LocalServer(local_settings(checkpoint)) as server:
        together = ask_together(server, EIGHT)
    assert [item.ids for item in together] == [item.ids for item in solo]
    assert max(mine.distance(theirs) for mine, theirs in zip(together, solo, strict=True)) < TOLERANCE


def test_eight_requests_with_room_for_two_equal_their_solo_runs(checkpoint: Path, solo: list[Answer]) -> None:
    with LocalServer(local_settings(checkpoint, max_running_requests=2)) as server:
        together = ask_together(server, EIGHT)
    assert [item.ids for item in together] == [item.ids for item in solo]


def test_seeded_sampling_is_the_same_alone_in_a_batch_and_in_another_order(checkpoint: Path) -> None:
    drawn = []
    for order in (range(8), range(7, -1, -1)):
        with LocalServer(local_settings(checkpoint)) as server:
            replies = {place: submit(server, EIGHT[place], seed=place, **SAMPLED) for place in order}
            drawn.append([answer(replies[place]).ids for place in range(8)])
    with LocalServer(local_settings(checkpoint)) as server:
        drawn.append([answer(submit(server, ask, seed=place, **SAMPLED)).ids for place, ask in enumerate(EIGHT)])
    assert drawn[0] == drawn[1] == drawn[2]


def test_another_seed_draws_another_answer(checkpoint: Path) -> None:
    with LocalServer(local_settings(checkpoint)) as server:
        answers = {answer(submit(server, MIXED[0], seed=seed, **SAMPLED)).ids for seed in range(4)}
    assert len(answers) > 1


def test_greedy_request_beside_sampled_ones_stays_greedy(checkpoint: Path, solo: list[Answer]) -> None:
    with LocalServer(local_settings(checkpoint)) as server:
        replies = [submit(server, ask, **(SAMPLED if place % 2 else {})) for place, ask in enumerate(EIGHT)]
        answers = [answer(reply).ids for reply in replies]
    assert answers[::2] == [item.ids for item in solo[::2]]


def test_top_k_of_one_is_greedy(checkpoint: Path, solo: list[Answer]) -> None:
    with LocalServer(local_settings(checkpoint)) as server:
        answers = ask_together(server, EIGHT, temperature=5, top_k=1)
    assert [item.ids for item in answers] == [item.ids for item in solo]


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("groups", [2, 3])
def test_micro_batches_equal_the_solo_runs(checkpoint: Path, solo: list[Answer], stages: int, groups: int) -> None:
    settings = local_settings(checkpoint, micro_batches=groups, prefill_token_budget=64)
    with LocalServer(settings, stages) as server:
        together = ask_together(server, EIGHT)
        overlapped = server.port.most_at_once
    assert [item.ids for item in together] == [item.ids for item in solo]
    assert max(mine.distance(theirs) for mine, theirs in zip(together, solo, strict=True)) < TOLERANCE
    assert overlapped > 1


def test_seeded_sampling_is_the_same_in_micro_batches(checkpoint: Path) -> None:
    drawn = []
    for groups in (1, 2):
        with LocalServer(local_settings(checkpoint, micro_batches=groups)) as server:
            replies = [submit(server, ask, seed=place, **SAMPLED) for place, ask in enumerate(EIGHT)]
            drawn.append([answer(reply).ids for reply in replies])
    assert drawn[0] == drawn[1]
