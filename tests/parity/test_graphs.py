"""A replayed step gives what an eager one gives, bit for bit, whatever ran before it in the same slots.

On a CPU, graphs are calls over the same static inputs (see support/graphs.py); tests/gpu asks the same of real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deepstack_serving.errors import SettingsError, StageError
from deepstack_serving.execution.recorder import CallRecorder, Replay
from tests.support.asking import MIXED, ONE_IMAGE, TEXT, Answer, Ask, ask_alone, ask_together, picture
from tests.support.graphs import SIZES, capture, pad, paged_attention_on_cpu, replays
from tests.support.local import LocalServer, local_settings, zero_deepstack

LONG = Ask("describe the image", (picture(190, 190, 5),))
SHORT = Ask("describe the image", (picture(64, 64, 6),))
# What is the engine's or the runner's alone is tested with one family.
one_family = pytest.mark.parametrize("checkpoint", ["qwen3_vl"], indirect=True, scope="session")
# Prompts of texts on both sides of the sizes 8 to 128, by their characters.
EDGES = tuple(Ask("a" * count) for count in (1, 2, 3, *range(8, 128, 15)))


@pytest.fixture(autouse=True, scope="module")
def _paged() -> Iterator[None]:
    with paged_attention_on_cpu():
        yield


class Refusing(CallRecorder):
    """What a device says of an operation that cannot be captured."""

    def record(self, function: Callable[[], dict[str, torch.Tensor]]) -> Replay:
        raise RuntimeError("operation not permitted when stream is capturing")


def graphs(checkpoint: Path, steps: int = 1, **options: object) -> LocalServer:
    settings = local_settings(checkpoint, decode_steps_per_call=steps, **SIZES)
    return capture(LocalServer(settings, held=True, **options))  # type: ignore[arg-type]


def eager(checkpoint: Path, **options: object) -> LocalServer:
    return pad(LocalServer(local_settings(checkpoint, **SIZES), held=True, **options))  # type: ignore[arg-type]


def largest_difference(mine: list[Answer], theirs: list[Answer]) -> float:
    assert [item.ids for item in mine] == [item.ids for item in theirs]
    return max(one.distance(other) for one, other in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_replays_equal_eager_steps(checkpoint: Path, stages: int) -> None:
    with graphs(checkpoint, stages=stages) as server, eager(checkpoint, stages=stages) as plain:
        assert largest_difference(ask_alone(server, MIXED), ask_alone(plain, MIXED)) == 0


def test_zeroed_deepstack_differs_in_replays(checkpoint: Path) -> None:
    with graphs(checkpoint) as server, graphs(checkpoint, change=zero_deepstack) as zeroed:
        [mine], [theirs] = ask_alone(server, [ONE_IMAGE]), ask_alone(zeroed, [ONE_IMAGE])
        assert mine.top_distance(theirs) > 0.1


def test_zeroed_deepstack_is_the_same_in_both(checkpoint: Path) -> None:
    with graphs(checkpoint, change=zero_deepstack) as server, eager(checkpoint, change=zero_deepstack) as plain:
        assert largest_difference(ask_alone(server, MIXED), ask_alone(plain, MIXED)) == 0


@pytest.mark.parametrize(
    "order", [(LONG, SHORT, TEXT), (TEXT, ONE_IMAGE), (SHORT, LONG, SHORT), (ONE_IMAGE, TEXT, LONG)]
)
def test_what_ran_before_leaves_nothing_behind(checkpoint: Path, order: tuple[Ask, ...]) -> None:
    alone = []
    for ask in order:
        with graphs(checkpoint) as server:
            alone += ask_alone(server, [ask])
    with graphs(checkpoint) as server:
        assert largest_difference(ask_alone(server, order), alone) == 0


@one_family
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.2, "top_p": 0.9, "seed": 5}])
def test_bursts_of_replays_equal_single_ones(checkpoint: Path, stages: int, sampling: dict[str, float]) -> None:
    with graphs(checkpoint, stages=stages) as single, graphs(checkpoint, steps=3, stages=stages) as bursts:
        mine, theirs = ask_alone(bursts, MIXED, **sampling), ask_alone(single, MIXED, **sampling)
        assert largest_difference(mine, theirs) == 0
        assert len(bursts.port.calls) < len(single.port.calls)
        assert all(stage.runner.continued for stage in bursts.port.language.values())


@one_family
def test_every_edge_of_a_size(checkpoint: Path) -> None:
    with graphs(checkpoint) as server, eager(checkpoint) as plain:
        assert largest_difference(ask_alone(server, EDGES), ask_alone(plain, EDGES)) == 0


@one_family
def test_mixed_requests_together(checkpoint: Path) -> None:
    asks = (*MIXED, SHORT, LONG, TEXT)
    with graphs(checkpoint) as server, eager(checkpoint) as plain:
        assert largest_difference(ask_together(server, asks), ask_together(plain, asks)) == 0


def test_padded_steps_agree_with_packed_ones(checkpoint: Path) -> None:
    with graphs(checkpoint) as server, LocalServer(local_settings(checkpoint)) as packed:
        assert largest_difference(ask_alone(server, MIXED), ask_alone(packed, MIXED)) < 1e-4


def test_only_stages_that_add_features_have_slots_for_them(checkpoint: Path) -> None:
    server = graphs(checkpoint, stages=4)
    with server:
        for stage in server.port.language.values():
            slots = {layer for layer in range(8) if f"ds_{layer}" in stage.runner.slots}
            assert slots == set(stage.plan.injected)
            assert replays(stage) == 8


def test_a_feature_that_does_not_fit_its_slot_fails_and_leaves_it(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepstack_serving.execution import runner

    with graphs(checkpoint, refusals=True) as server:
        ask_alone(server, [ONE_IMAGE])
        stage = next(stage for stage in server.port.language.values() if stage.plan.injected)
        name = f"ds_{stage.plan.injected[0]}"
        before = stage.runner.slots.buffer(name).clone()
        whole = runner.StepFeatures.scattered
        monkeypatch.setattr(
            runner.StepFeatures, "scattered", lambda *a: replace(whole(*a), values=whole(*a).values[:, :-1])
        )
        with pytest.raises(StageError, match=f"slot {name!r} takes"):
            ask_alone(server, [ONE_IMAGE])
        assert torch.equal(stage.runner.slots.buffer(name), before)


@one_family
def test_a_capture_that_fails_names_the_setting(checkpoint: Path) -> None:
    with LocalServer(local_settings(checkpoint, **SIZES)) as server:
        stage = next(iter(server.port.language.values()))
        with pytest.raises(SettingsError, match=r"'execution'.*not permitted.*'eager', or 'graph_fallback' to true"):
            stage.capture(Refusing())


@one_family
def test_a_capture_that_fails_goes_on_eagerly_where_that_is_allowed(checkpoint: Path) -> None:
    with LocalServer(local_settings(checkpoint, graph_fallback=True, **SIZES), held=True) as server:
        for stage in server.port.language.values():
            stage.capture(Refusing())
            assert replays(stage) == 0
            assert stage.info.execution == "eager"
        with eager(checkpoint) as plain:
            assert largest_difference(ask_alone(server, MIXED), ask_alone(plain, MIXED)) == 0


def test_what_leaves_a_stage_is_never_rewritten(checkpoint: Path) -> None:
    sent: list[tuple[torch.Tensor, torch.Tensor]] = []

    def remember(_model: str, _name: str, tensor: torch.Tensor) -> torch.Tensor:
        sent.append((tensor, tensor.clone()))
        return tensor

    with graphs(checkpoint, change=remember) as server:
        ask_alone(server, [*MIXED, LONG])
    assert len(sent) > 50
    assert all(torch.equal(tensor, copy) for tensor, copy in sent)
