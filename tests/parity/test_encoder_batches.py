"""Images of several requests in one call of the encoder: each request gets its own rows, and its own errors."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from pathlib import Path

import pytest
import torch

from deepstack_serving.engine.encoder import Done, Encoder
from deepstack_serving.engine.sequence import Sequence
from deepstack_serving.errors import InvalidRequestError
from deepstack_serving.media import MediaFiles
from tests.support.asking import Answer, Ask, answer, ask_alone, ask_together, picture, submit
from tests.support.local import Change, CollectingReply, LocalPort, LocalServer, keep, local_settings, zero_deepstack

ASKS = (
    Ask("describe the image", (picture(100, 70, 1),)),
    Ask("compare the pictures", (picture(64, 64, 2), picture(130, 66, 3))),
    Ask("what is it?", (picture(64, 96, 4),)),
    Ask("and this?", (picture(96, 64, 5),)),
)
BROKEN = Ask("what is it?", (picture(64, 64, 6)[:-300],))
TOLERANCE = 1e-4  # the tower rounds differently over other numbers of rows


class DevicePort(LocalPort):
    """Features that stay on a device: those of two calls cannot be joined."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.images: list[int] = []
        self.coming: list[tuple[bytes, ...]] = []

    def call_encoder(self, files: MediaFiles, outputs: SequenceOf[str]) -> dict[str, torch.Tensor]:
        if files.images:
            self.images.append(len(files.images))
            self.coming.append(files.coming)
        return super().call_encoder(files, outputs)

    def is_on_host(self, handle: torch.Tensor) -> bool:
        return False

    def join(self, name: str, handles: SequenceOf[torch.Tensor]) -> torch.Tensor:
        [handle] = handles
        return handle


class BatchingEncoder(Encoder):
    """As a GPU's."""

    tokens = 1000

    @property
    def batch_tokens(self) -> int:
        return self.tokens

    @batch_tokens.setter
    def batch_tokens(self, _: int) -> None:
        pass


class GatheringEncoder(BatchingEncoder):
    """Encodes once so many requests wait; in the caller's thread."""

    together = len(ASKS)

    def submit(self, sequences: Iterable[Sequence], done: Done, coming: Iterable[Sequence] = ()) -> None:
        self.enqueue(sequences, done, coming)
        if self.waiting == self.together:
            while self.waiting:
                self.run_next()


class PairingEncoder(GatheringEncoder):
    """Two requests of one length in a call."""

    def submit(self, sequences: Iterable[Sequence], done: Done, coming: Iterable[Sequence] = ()) -> None:
        items = list(sequences)
        self.tokens = max((2 * item.prompt_tokens for item in items), default=self.tokens)
        super().submit(items, done, coming)


class BrokenUpEncoder(GatheringEncoder):
    """As a CPU's: a request a call."""

    tokens = 0


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> list[Answer]:
    with LocalServer(local_settings(checkpoint)) as server:
        return ask_alone(server, ASKS)


def gathering(monkeypatch: pytest.MonkeyPatch, checkpoint: Path, change: Change = keep) -> LocalServer:
    monkeypatch.setattr("tests.support.local.LocalPort", DevicePort)
    monkeypatch.setattr("tests.support.local.InlineEncoder", GatheringEncoder)
    return LocalServer(local_settings(checkpoint), change=change, held=True, refusals=True)


def test_requests_that_come_together_are_encoded_together(
    checkpoint: Path, alone: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the encoder's own threads, one of which could begin with the first."""
    monkeypatch.setattr("tests.support.local.LocalPort", DevicePort)
    monkeypatch.setattr("tests.support.local.InlineEncoder", BatchingEncoder)
    with LocalServer(local_settings(checkpoint), held=True) as server:
        together = ask_together(server, ASKS)
        assert images(server) == [5]
    assert largest_difference(together, alone) < TOLERANCE


def images(server: LocalServer) -> list[int]:
    assert isinstance(server.port, DevicePort)
    return server.port.images


def largest_difference(mine: list[Answer], theirs: list[Answer]) -> float:
    assert [item.ids for item in mine] == [item.ids for item in theirs]
    return max(one.distance(other) for one, other in zip(mine, theirs, strict=True))


def test_each_request_gets_its_own_rows(checkpoint: Path, alone: list[Answer], monkeypatch: pytest.MonkeyPatch) -> None:
    with gathering(monkeypatch, checkpoint) as server:
        together = ask_together(server, ASKS)
        assert images(server) == [5]
    assert largest_difference(together, alone) < TOLERANCE


def test_zeroed_features_differ(checkpoint: Path, alone: list[Answer], monkeypatch: pytest.MonkeyPatch) -> None:
    with gathering(monkeypatch, checkpoint, zero_deepstack) as server:
        together = ask_together(server, ASKS)
    assert min(mine.top_distance(theirs) for mine, theirs in zip(together, alone, strict=True)) > 0.1


def test_calls_are_no_larger_than_a_step(
    checkpoint: Path, alone: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GatheringEncoder, "tokens", 12)
    with gathering(monkeypatch, checkpoint) as server:
        together = ask_together(server, ASKS)
        assert sum(images(server)) == 5
        assert len(images(server)) > 1
    assert largest_difference(together, alone) < TOLERANCE


def test_a_call_names_the_images_of_the_next_one(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where requests go together; else nothing computes while files are decoded."""
    asks = [Ask("what is it?", (picture(64, 64, seed),)) for seed in range(5)]
    files = [image for ask in asks for image in ask.images]
    monkeypatch.setattr(GatheringEncoder, "together", len(asks))
    with LocalServer(local_settings(checkpoint)) as server:
        alone = ask_alone(server, asks)
    for encoder, expected in (
        (PairingEncoder, [files[2:4], files[4:], []]),
        (GatheringEncoder, [[]]),
        (BrokenUpEncoder, [[]] * 5),
    ):
        monkeypatch.setattr("tests.support.local.LocalPort", DevicePort)
        monkeypatch.setattr("tests.support.local.InlineEncoder", encoder)
        with LocalServer(local_settings(checkpoint), held=True) as server:
            together = ask_together(server, asks)
            assert isinstance(server.port, DevicePort)
            assert [list(named) for named in server.port.coming] == expected
        assert largest_difference(together, alone) < TOLERANCE


def test_one_broken_image_is_its_own_requests_error(
    checkpoint: Path, alone: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    asks = (*ASKS[:2], BROKEN, *ASKS[2:])
    monkeypatch.setattr(GatheringEncoder, "together", len(asks))
    with gathering(monkeypatch, checkpoint) as server:
        replies: list[CollectingReply] = [submit(server, ask) for ask in asks]
        server.start()
        with pytest.raises(InvalidRequestError, match=r"image\[0\]"):
            answer(replies.pop(2))
        assert largest_difference([answer(reply) for reply in replies], alone) < TOLERANCE
