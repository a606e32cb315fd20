"""What one request leaves behind or breaks reaches no other: images, KV blocks, values that are not finite."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from deepstack_serving.errors import StageError
from deepstack_serving.wire import VISION_ENCODER
from tests.support.asking import MIXED, ONE_IMAGE, TEXT, THREE_IMAGES, Ask, answer, ask_alone, picture, submit
from tests.support.local import STAGE_NAMES, Change, LocalPort, LocalServer, keep, local_settings
from tests.support.runs import Run
from tests.support.stateless import feature_names

CAT, DOG = Ask("describe the image", (picture(96, 64, 10),)), Ask("describe the image", (picture(96, 64, 11),))
LONG = {"max_tokens": 24}


POOL_TOKENS = {"qwen3_vl": 128, "qwen3_vl_moe": 128, "granite4_vision": 304}


class Poison:
    """While armed, fills one named tensor with NaN; counts how often."""

    def __init__(self, model: str, name: str) -> None:
        self._where, self.armed, self.hits = (model, name), False, 0

    def __call__(self, model: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if not self.armed or (model, name) != self._where:
            return tensor
        self.hits += 1
        return torch.full_like(tensor, torch.nan)


def one_server(checkpoint: Path, change: Change = keep) -> LocalServer:
    """A pool so small that every request takes blocks that earlier ones used."""
    return LocalServer(local_settings(checkpoint, kv_pool_tokens=POOL_TOKENS[checkpoint.name]), 2, change, held=True)


@pytest.fixture
def server(checkpoint: Path) -> Iterator[LocalServer]:
    with one_server(checkpoint) as server:
        yield server


def test_other_image_gives_another_answer(server: LocalServer) -> None:
    cat, dog = ask_alone(server, [CAT, DOG])
    assert cat.top_distance(dog) > 0.1


def test_interleaved_images_equal_their_solo_runs(server: LocalServer) -> None:
    cat, dog = ask_alone(server, [CAT, DOG])
    replies = [submit(server, ask) for ask in (CAT, DOG, CAT, DOG)]
    answers = [answer(reply) for reply in replies]
    assert [item.ids for item in answers] == [cat.ids, dog.ids] * 2


def test_text_after_an_image_in_the_same_blocks_equals_its_solo_run(checkpoint: Path, unsplit: Run) -> None:
    with one_server(checkpoint) as server:
        assert ask_alone(server, [THREE_IMAGES, ONE_IMAGE, TEXT])[2] == unsplit.alone[0]


def test_image_after_a_long_text_in_the_same_blocks_equals_its_solo_run(checkpoint: Path, unsplit: Run) -> None:
    with one_server(checkpoint) as server:
        assert ask_alone(server, [Ask("a cat " * 30), ONE_IMAGE])[1] == unsplit.alone[1]


@pytest.mark.parametrize(
    ("model", "name", "victim"),
    [
        (VISION_ENCODER, "first feature", ONE_IMAGE),
        (VISION_ENCODER, "ds_0", ONE_IMAGE),
        (VISION_ENCODER, "last feature", THREE_IMAGES),
        ("language_early", "hidden_states", TEXT),
    ],
)
def test_nan_fails_its_request_and_leaves_the_blocks_usable(
    checkpoint: Path, unsplit: Run, model: str, name: str, victim: Ask
) -> None:
    features = feature_names(LocalPort(local_settings(checkpoint), STAGE_NAMES[1]))
    poison = Poison(model, {"first feature": features[0], "last feature": features[-1]}.get(name, name))
    with one_server(checkpoint, poison) as server:
        server.start()
        poison.armed = True
        failed = submit(server, victim).wait()
        poison.armed = False
        answers = ask_alone(server, MIXED)
    assert isinstance(failed.error, StageError)
    assert "not finite" in str(failed.error)
    assert answers == unsplit.alone


def test_nan_in_one_requests_features_leaves_its_batch_alone(checkpoint: Path, unsplit: Run) -> None:
    poison = Poison(VISION_ENCODER, "ds_1")

    def first_image_only(model: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
        poison.armed = poison.hits == 0
        return poison(model, name, tensor)

    with one_server(checkpoint, first_image_only) as server:
        text, one, three = (submit(server, ask) for ask in MIXED)
        server.start()
        answers = [answer(text), answer(three)]
        assert isinstance(one.wait().error, StageError)
    others = [unsplit.together[0], unsplit.together[2]]
    assert [item.ids for item in answers] == [item.ids for item in others]
    # Not exactly equal: the batch goes on with one row less.
    assert max(mine.distance(theirs) for mine, theirs in zip(answers, others, strict=True)) < 5e-5


def test_nan_in_a_running_requests_keys_fails_it_alone(checkpoint: Path, unsplit: Run) -> None:
    """The second text's rows are spoilt in a decode step, beside the first text's."""
    steps = 0

    def spoil_second_row(model: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
        nonlocal steps
        if (model, name) != ("language_early", "hidden_states"):
            return tensor
        steps += 1
        if steps == 3:
            tensor = tensor.clone()
            tensor[1] = torch.nan
        return tensor

    with one_server(checkpoint, spoil_second_row) as server:
        healthy, spoilt = submit(server, TEXT, **LONG), submit(server, TEXT, **LONG)
        server.start()
        ids = answer(healthy).ids
        error = spoilt.wait().error
        after = ask_alone(server, [TEXT, TEXT])
    assert isinstance(error, StageError)
    assert ids[:8] == unsplit.alone[0].ids
    assert after == [unsplit.alone[0]] * 2
