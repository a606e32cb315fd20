"""Several pipelines behind one door: where requests go, and that answers are those of one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from deepstack_serving.engine.ports import Output, ReplyPort
from deepstack_serving.engine.sharing import SharedDoor
from deepstack_serving.errors import DeepstackError, InvalidRequestError
from tests.support.asking import MIXED, answer, ask_alone, request_inputs
from tests.support.local import CollectingReply, LocalServer, local_settings

LAST = Output("", "stop", 1, 1, 0.0)


class Holding:
    """Keeps requests open."""

    def __init__(self) -> None:
        self.replies: list[ReplyPort] = []
        self.is_healthy = True
        self.is_running = False

    def start(self) -> None:
        self.is_running = True

    def submit(self, _inputs: Mapping[str, Any], _parameters: Mapping[str, Any], reply: ReplyPort) -> None:
        self.replies.append(reply)

    def close(self) -> None:
        self.is_running = False


class Reply:
    def __init__(self) -> None:
        self.ends = 0
        self.is_broken = False

    def send(self, _output: Output, *, final: bool) -> None:
        if self.is_broken:
            raise RuntimeError("cannot be sent")
        self.ends += final

    def fail(self, _error: DeepstackError) -> None:
        self.ends += 1

    def is_cancelled(self) -> bool:
        return True


@pytest.fixture
def pipelines() -> list[Holding]:
    return [Holding(), Holding(), Holding()]


@pytest.fixture
def door(pipelines: list[Holding]) -> SharedDoor:
    return SharedDoor(pipelines)  # type: ignore[arg-type]


def submit(door: SharedDoor, count: int) -> list[Reply]:
    replies = [Reply() for _ in range(count)]
    for reply in replies:
        door.submit({}, {}, reply)
    return replies


def held(pipelines: list[Holding]) -> list[int]:
    return [len(pipeline.replies) for pipeline in pipelines]


def test_a_request_goes_where_the_fewest_are_open(door: SharedDoor, pipelines: list[Holding]) -> None:
    submit(door, 7)
    assert held(pipelines) == [3, 2, 2]
    for reply in pipelines[1].replies:
        reply.send(LAST, final=False)  # not its end
    submit(door, 2)
    assert held(pipelines) == [3, 3, 3]
    for reply in pipelines[1].replies[:2]:
        reply.send(LAST, final=True)
        reply.fail(InvalidRequestError("too late"))  # ends it no second time
    pipelines[2].replies[0].fail(InvalidRequestError("bad"))
    submit(door, 3)
    assert held(pipelines) == [3, 5, 4]


def test_a_reply_that_cannot_be_sent_is_open_no_longer(door: SharedDoor, pipelines: list[Holding]) -> None:
    [reply] = submit(door, 1)
    reply.is_broken = True
    with pytest.raises(RuntimeError):
        pipelines[0].replies[0].send(LAST, final=True)
    assert [member.open_requests for member in door._members] == [0, 0, 0]


def test_requests_one_after_the_other_go_round(door: SharedDoor, pipelines: list[Holding]) -> None:
    for _ in range(4):
        submit(door, 1)
        for pipeline in pipelines:
            for reply in pipeline.replies:
                reply.send(LAST, final=True)
    assert held(pipelines) == [2, 1, 1]


def test_pipelines_that_are_not_healthy_are_passed_over(door: SharedDoor, pipelines: list[Holding]) -> None:
    assert door.is_healthy
    pipelines[0].is_healthy = False
    assert not door.is_healthy
    submit(door, 4)
    assert held(pipelines) == [0, 2, 2]
    for pipeline in pipelines:
        pipeline.is_healthy = False
    submit(door, 1)  # it waits there, and is told so
    assert held(pipelines) == [1, 2, 2]


def test_all_are_started_and_closed(door: SharedDoor, pipelines: list[Holding]) -> None:
    door.start()
    assert all(pipeline.is_running for pipeline in pipelines)
    door.close()
    assert not any(pipeline.is_running for pipeline in pipelines)


def test_reply_passes_on_what_it_is_told(door: SharedDoor, pipelines: list[Holding]) -> None:
    [reply] = submit(door, 1)
    assert pipelines[0].replies[0].is_cancelled()
    pipelines[0].replies[0].send(LAST, final=True)
    assert reply.ends == 1


def test_two_pipelines_answer_as_one(checkpoint: Path) -> None:
    settings = local_settings(checkpoint)
    with LocalServer(settings) as alone:
        expected = ask_alone(alone, MIXED)
    with LocalServer(settings) as first, LocalServer(settings) as second:
        door = SharedDoor([first.orchestrator, second.orchestrator])
        replies = [CollectingReply() for _ in MIXED]
        for ask, reply in zip(MIXED, replies, strict=True):
            door.submit(request_inputs(ask), {}, reply)
        answers = [answer(reply) for reply in replies]
        assert [engine.stats.steps > 0 for engine in door.engines] == [True, True]
    assert [item.ids for item in answers] == [item.ids for item in expected]
    assert max(one.distance(other) for one, other in zip(answers, expected, strict=True)) < 1e-4
