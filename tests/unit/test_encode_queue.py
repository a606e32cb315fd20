"""How far the encoder may be ahead of the language stages: what it gives takes memory until its prompt is computed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepstack_serving.engine import engine as engine_module
from deepstack_serving.engine.encode_queue import COMPANY_S, EncodeQueue
from deepstack_serving.engine.encoder import Done
from deepstack_serving.engine.sequence import EncodedBatch, Features, Sequence, Status
from deepstack_serving.families.base import Positions
from tests.support.asking import ONE_IMAGE, submit
from tests.support.local import LocalServer, local_settings
from tests.support.sequences import sequence

STEP_TOKENS = 100


class Taking:
    """Takes what is submitted, and encodes nothing."""

    batch_tokens = STEP_TOKENS

    def __init__(self) -> None:
        self.taken: list[Sequence] = []
        self.together: list[int] = []  # how many came in each call

    def submit(self, items: Iterable[Sequence], _done: Done, _coming: Iterable[Sequence] = ()) -> None:
        new = list(items)
        self.taken += new
        self.together.append(len(new))


def done(_sequence: Sequence, _result: Any) -> None:
    pass


def with_image(tokens: int) -> Sequence:
    made = sequence(tokens, 5, files=(b"image",))
    made.status = Status.ENCODING
    return made


def encode(item: Sequence) -> None:
    positions = Positions(np.zeros((3, item.prompt.length), dtype=np.int64), 0)
    item.features, item.status = Features(EncodedBatch({}, 1), 0, positions), Status.RUNNING


@pytest.fixture
def encoder() -> Taking:
    return Taking()


@pytest.fixture
def queue(encoder: Taking) -> EncodeQueue:
    return EncodeQueue(encoder, STEP_TOKENS)  # type: ignore[arg-type]


def begun(queue: EncodeQueue, encoder: Taking, running: list[Sequence]) -> int:
    queue.begin(running, done)
    assert encoder.taken == running[: len(encoder.taken)]  # first come, first encoded
    return len(encoder.taken)


def test_prompts_of_two_steps_are_encoded_at_once(queue: EncodeQueue, encoder: Taking) -> None:
    running = [with_image(50) for _ in range(7)]
    for item in running:
        queue.add(item)
    assert begun(queue, encoder, running) == 4
    assert encoder.together == [4]
    encode(running[0])
    assert begun(queue, encoder, running) == 4  # what is encoded counts until it is used
    running[0].features = None
    assert begun(queue, encoder, running) == 4  # the fifth and the sixth may soon go together
    running[1].status = Status.FINISHED
    assert begun(queue, encoder, running) == 6
    running[2].status = Status.FINISHED
    assert begun(queue, encoder, running) == 7  # nobody waits behind the seventh
    assert encoder.together == [4, 2, 1]


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def decoding() -> Sequence:
    made = sequence(5, 40)
    made.status, made.computed = Status.RUNNING, 5
    return made


def test_image_waits_a_moment_for_company(encoder: Taking, decoding: Sequence) -> None:
    clock = Clock()
    queue = EncodeQueue(encoder, STEP_TOKENS, clock)  # type: ignore[arg-type]
    images = [with_image(40) for _ in range(4)]

    def begun(count: int) -> list[int]:
        """Add so many of the images, and say how many went to the encoder together each time."""
        for _ in range(count):
            queue.add(images.pop())
        queue.begin([decoding], done, patient=True)
        return encoder.together

    assert begun(1) == []
    clock.now_s += COMPANY_S / 2
    assert begun(1) == [2]  # a third would not fit beside them
    assert begun(1) == [2]
    clock.now_s += 1.1 * COMPANY_S
    assert begun(0) == [2, 1]
    decoding.computed = 0
    assert begun(1) == [2, 1, 1]  # nothing else is computed meanwhile


@pytest.mark.parametrize("tokens", [0, STEP_TOKENS // 2])
def test_image_does_not_wait_where_calls_take_no_two(encoder: Taking, decoding: Sequence, tokens: int) -> None:
    encoder.batch_tokens = tokens
    queue = EncodeQueue(encoder, STEP_TOKENS)  # type: ignore[arg-type]
    queue.add(with_image(40))
    queue.begin([decoding], done, patient=True)
    assert encoder.together == [1]


def test_image_does_not_wait_for_an_engine_that_is_not_back_in_a_moment(
    queue: EncodeQueue, encoder: Taking, decoding: Sequence
) -> None:
    queue.add(with_image(40))
    queue.begin([decoding], done)
    assert encoder.together == [1]


def test_requests_that_ended_hold_nobody_up(queue: EncodeQueue, encoder: Taking) -> None:
    ended, live = [with_image(60) for _ in range(20)], with_image(60)
    for item in (*ended, live):
        queue.add(item)
    for item in ended:
        item.status = Status.FINISHED
    queue.begin([live], done)
    assert encoder.taken == [live]
    assert not queue._waiting
    live.status = Status.FINISHED
    queue.add(live)
    queue.begin([], done)
    assert not queue._waiting


def test_longer_prompts_go_alone(queue: EncodeQueue, encoder: Taking) -> None:
    running = [with_image(tokens) for tokens in (10, 500, 10)]
    for item in running:
        queue.add(item)
    assert begun(queue, encoder, running) == 1
    running[0].status = Status.FINISHED
    assert begun(queue, encoder, running) == 2
    encode(running[1])
    running[1].features = None
    assert begun(queue, encoder, running) == 3


def test_request_that_ended_meanwhile_is_not_encoded(queue: EncodeQueue, encoder: Taking) -> None:
    first, second = with_image(50), with_image(50)
    first.status = Status.FINISHED
    for item in (first, second):
        queue.add(item)
    queue.begin([second], done)
    assert encoder.taken == [second]


def test_next_image_is_encoded_at_once_when_an_answer_ends_with_its_prompt(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "IDLE_WAIT_S", 600.0)
    settings = local_settings(checkpoint, prefill_token_budget=16, max_running_requests=16)
    with LocalServer(settings, held=True) as server:
        replies = [submit(server, ONE_IMAGE, max_tokens=1, logprobs=0) for _ in range(4)]
        server.start()
        assert [reply.wait().finals for reply in replies] == [1] * 4
