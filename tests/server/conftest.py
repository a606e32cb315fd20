"""One real server with the four models for all tests that leave it as they found it, and the check that they did."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from deepstack_serving.embedded import EmbeddedServer
from tests.support.asking import ONE_IMAGE, TEXT, Answer, ask_alone
from tests.support.local import LocalServer, local_settings
from tests.support.raw_client import Reply, ask, request
from tests.support.server import gated_repository, is_whole, serving
from tests.support.stalls import StallWatch


class ServerDiedError(AssertionError):
    """The server that the tests share has ended."""


@pytest.fixture(scope="session")
def known_answers(checkpoint: Path) -> list[Answer]:
    """What the same stages and engine answer without a server, one question with an image and one without."""
    with LocalServer(local_settings(checkpoint)) as local:
        return ask_alone(local, (ONE_IMAGE, TEXT))


@pytest.fixture(scope="session")
def shared_server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """A pool smaller than the context (4,096 tokens), and prompts computed in small pieces."""
    settings: dict[str, object] = {
        "prefill_token_budget": 64,
        "max_images_per_request": 4,
        "max_image_bytes": 1 << 20,
        "vision_cache_bytes": 1 << 20,
        "max_videos_per_request": 2,
        "max_video_bytes": 1 << 20,
        "max_video_seconds": 20,
        "max_video_pixels": 200_000,
    }
    repository = gated_repository(tmp_path_factory.mktemp("shared") / "repository")
    with serving(checkpoint, tmp_path_factory.mktemp("run"), repository, **settings) as server:
        yield server


@pytest.fixture
def server(shared_server: EmbeddedServer, known_answers: list[Answer]) -> Iterator[EmbeddedServer]:
    """The shared server; after the test all its blocks are free and it still answers rightly."""
    check_alive(shared_server)
    with StallWatch() as watch:
        yield shared_server
    check_alive(shared_server, watch.longest_s)
    assert is_whole(shared_server)
    check_known_answers(shared_server, known_answers)


def check_alive(server: EmbeddedServer, stall_s: float = 0.0) -> None:
    """Raises with the end of the server's log, which names the place where it ended."""
    if not server.is_running():
        raise ServerDiedError(f"{server.ended_error()}\nlongest standstill of this machine meanwhile: {stall_s:.2f} s")


def check_known_answers(server: EmbeddedServer, known: list[Answer]) -> None:
    for question, answer in zip((ONE_IMAGE, TEXT), known, strict=True):
        check_answer(ask(server, request(question.text, question.images, logprobs=1)), answer)


def check_answer(reply: Reply, answer: Answer) -> None:
    assert tuple(reply.token_ids) == answer.ids
    np.testing.assert_allclose(reply.logprobs, answer.logprobs, atol=1e-4)
