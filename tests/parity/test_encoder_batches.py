"""Images of several requests in one call of the encoder: each request gets its own rows, and its own errors."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from pathlib import Path

import pytest
import torch

from deepstack_serving.checkpoint import open_checkpoint
from deepstack_serving.engine.encoder import Done, Encoder
from deepstack_serving.engine.sequence import Sequence, Status
from deepstack_serving.errors import DeepstackError, InvalidRequestError, StageError
from deepstack_serving.media import MediaFiles
from tests.support.asking import Answer, Ask, answer, ask_alone, ask_together, picture, submit
from tests.support.local import Change, CollectingReply, LocalPort, LocalServer, keep, local_settings, zero_deepstack
from tests.support.sequences import sequence

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


def encoder_of(checkpoint: Path, port: LocalPort) -> Encoder:
    made = BatchingEncoder(port, open_checkpoint(checkpoint), 1)
    made.tokens = 40
    return made


def with_image(tokens: int, image: bytes) -> Sequence:
    made = sequence(tokens, 5, files=(image,))
    made.status = Status.ENCODING
    return made


class Refusing(LocalPort):
    """Notes what calls name, and refuses those that name coming images, or all."""

    def __init__(self, error: type[DeepstackError] | None = None, always: bool = False) -> None:
        self.calls: list[tuple[tuple[bytes, ...], tuple[bytes, ...]]] = []
        self._error, self._always = error, always

    def call_encoder(self, files: MediaFiles, outputs: SequenceOf[str]) -> dict[str, torch.Tensor]:
        self.calls.append((files.images, files.coming))
        if self._error and (files.coming or self._always):
            raise self._error("refused")
        return {name: torch.zeros(0) for name in outputs}


def run_all(encoder: Encoder, *sequences: Sequence) -> dict[Sequence, object]:
    results: dict[Sequence, object] = {}
    encoder.enqueue(sequences, results.__setitem__)
    while encoder.waiting:
        encoder.run_next()
    return results


def test_requests_that_ended_are_not_named(checkpoint: Path) -> None:
    first, ended, live = (with_image(40, image) for image in (b"a", b"b", b"c"))
    ended.status = Status.FINISHED
    port = Refusing()
    run_all(encoder_of(checkpoint, port), first, ended, live)
    assert port.calls == [((b"a",), (b"c",)), ((b"c",), ())]


def test_coming_images_are_let_go_with_the_last_call(checkpoint: Path) -> None:
    first, later = with_image(40, b"a"), with_image(40, b"b")
    port = Refusing()
    encoder = encoder_of(checkpoint, port)
    encoder.enqueue([first], lambda *_: None, [later])
    encoder.run_next()
    assert port.calls == [((b"a",), (b"b",))]
    gone = weakref.ref(later)
    del later
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(("error", "calls"), [(StageError, 2), (InvalidRequestError, 1)])
def test_what_coming_images_do_to_a_call_is_not_the_requests_error(
    checkpoint: Path, error: type[DeepstackError], calls: int
) -> None:
    """Tried again without them, unless it says what is wrong with the request."""
    port = Refusing(error)
    first, later = with_image(40, b"a"), with_image(40, b"b")
    run_all(encoder_of(checkpoint, port), first, later)
    assert [images for images, _ in port.calls].count((b"a",)) == calls


def test_a_video_has_the_decoders_for_itself(checkpoint: Path) -> None:
    film, later = with_image(40, b"a"), with_image(40, b"b")
    film.files = MediaFiles(videos=(b"film",))
    port = Refusing()
    run_all(encoder_of(checkpoint, port), film, later)
    assert port.calls[0] == ((), ())


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
