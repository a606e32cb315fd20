"""Which runs of a tower become graphs, and what becomes of inputs and outputs; recorded calls stand for graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Barrier, BrokenBarrierError

import pytest
import torch

from deepstack_serving.errors import SettingsError, StageError
from deepstack_serving.execution.recorder import CallRecorder, Recorder, Replay
from deepstack_serving.families.base import VisionFeatures
from deepstack_serving.families.vision_tower import CapturableTower, Compiler, TowerCall
from deepstack_serving.settings import Settings, parse_settings
from deepstack_serving.stages.vision_graphs import GraphBounds, TowerRunner

WIDTH = 3


class Doubling(CapturableTower):
    """Features are the pixels doubled and, of layer 7, tripled; counts its runs."""

    can_compile = False

    def __init__(self) -> None:
        self.runs = 0
        self.layouts: list[tuple[int, ...]] = []
        self.failing = False

    def arrange(self, inputs: Mapping[str, torch.Tensor]) -> TowerCall:
        return TowerCall({"pixels": inputs["pixels"]}, tuple(inputs["lengths"].tolist()))

    def run(self, call: TowerCall) -> VisionFeatures:
        self.runs += 1
        self.layouts.append(call.layout)
        if self.failing:
            raise RuntimeError("the device is gone")
        return VisionFeatures(2 * call.tensors["pixels"], {7: 3 * call.tensors["pixels"]})

    def compile_blocks(self, compiler: Compiler) -> None:
        raise NotImplementedError

    def examples(self) -> Iterator[dict[str, torch.Tensor]]:
        yield images(1, 1)

    def usual_example(self) -> dict[str, torch.Tensor]:
        return images(100)


class Compiled(Doubling):
    can_compile = True

    def compile_blocks(self, compiler: Compiler) -> None:
        """There are none."""


class Waiting(Doubling):
    """Each run waits a moment for another one to begin beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.met = False
        self._meeting = Barrier(2)

    def run(self, call: TowerCall) -> VisionFeatures:
        with suppress(BrokenBarrierError):
            self._meeting.wait(0.2)
            self.met = True
        return super().run(call)


class NoRecorder:
    """A device that cannot capture."""

    def record(self, function: Callable[[], dict[str, torch.Tensor]]) -> Replay:
        raise RuntimeError("operation not permitted when stream is capturing")

    def cut(self) -> None:
        pass


def images(*lengths: int, value: float = 1.0) -> dict[str, torch.Tensor]:
    return {"pixels": torch.full((sum(lengths), WIDTH), value), "lengths": torch.tensor(lengths)}


def only(tensor: torch.Tensor) -> float:
    [value] = set(tensor.flatten().tolist())
    return float(value)


@pytest.fixture
def settings(tmp_path: Path) -> Callable[..., Settings]:
    (tmp_path / "config.json").write_text("{}")
    return lambda **values: parse_settings({"checkpoint": str(tmp_path), "compile": "off", **values})


@pytest.fixture
def tower() -> Doubling:
    return Doubling()


Start = Callable[..., TowerRunner]


@pytest.fixture
def start(tower: Doubling, settings: Callable[..., Settings]) -> Start:
    def started(recorder: Recorder | None = None, bounds: GraphBounds | None = None, **values: str) -> TowerRunner:
        runner = TowerRunner(tower, settings(**values), bounds)
        runner.start(recorder)
        return runner

    return started


def test_a_layout_is_captured_when_it_comes_again(start: Start) -> None:
    runner = start(CallRecorder())
    runner.run(images(4))
    assert (4,) not in runner.captured
    runner.run(images(4))
    assert (4,) in runner.captured
    runner.run(images(2, 2))
    assert (2, 2) not in runner.captured


def test_the_examples_are_captured_at_the_start(start: Start) -> None:
    assert start(CallRecorder()).captured == ((1, 1),)


def test_without_a_recorder_nothing_is_captured(start: Start, tower: Doubling) -> None:
    runner = start()
    for _ in range(3):
        runner.run(images(4))
    assert (runner.captured, runner.captures, tower.runs) == ((), False, 4)


def test_outputs_are_copies_that_later_runs_leave_alone(start: Start) -> None:
    runner = start(CallRecorder())
    outputs = [runner.run(images(4, value=value)) for value in (1.0, 2.0, 3.0, 4.0)]
    assert [only(item["image_embeds"]) for item in outputs] == [2.0, 4.0, 6.0, 8.0]
    assert [only(item["ds_7"]) for item in outputs] == [3.0, 6.0, 9.0, 12.0]


def test_inputs_are_copied_too(start: Start) -> None:
    runner, given = start(CallRecorder()), images(4, value=5.0)
    for _ in range(2):
        runner.run(given)
    runner.run(images(4, value=6.0))
    assert only(given["pixels"]) == 5.0


def test_a_tensor_that_does_not_fit_raises_before_any_write(start: Start) -> None:
    runner = start(CallRecorder())
    for _ in range(2):
        runner.run(images(4))
    for wrong in (torch.ones(1, WIDTH), torch.ones(4, 1), torch.ones(4, WIDTH, dtype=torch.float64)):
        with pytest.raises(StageError, match="'pixels'"):
            runner.run({"pixels": wrong, "lengths": torch.tensor([4])})
    assert only(runner.run(images(4, value=2.0))["image_embeds"]) == 4.0


@pytest.mark.parametrize(
    ("bounds", "kept"),
    [
        (GraphBounds(graphs=2), ((6,), (3,))),
        (GraphBounds(total_rows=9), ((6,), (3,))),
        (GraphBounds(rows=3), ((1, 1), (3,))),
        (GraphBounds(total_rows=6), ((3,),)),
    ],
)
def test_graphs_are_bounded_and_the_longest_unused_goes_first(
    start: Start, bounds: GraphBounds, kept: tuple[tuple[int, ...], ...]
) -> None:
    runner = start(CallRecorder(), bounds)
    for rows in (6, 3):
        for _ in range(2):
            runner.run(images(rows))
    assert runner.captured == kept


def test_a_graph_that_is_used_stays(start: Start) -> None:
    runner = start(CallRecorder(), GraphBounds(graphs=2))
    for rows in (3, 3, 4, 4, 3, 5, 5):
        runner.run(images(rows))
    assert runner.captured == ((3,), (5,))


def test_layouts_that_came_once_are_forgotten(start: Start) -> None:
    runner = start(CallRecorder(), GraphBounds(remembered=2))
    for rows in (3, 4, 5, 3):
        runner.run(images(rows))
    assert (3,) not in runner.captured


def test_one_run_at_a_time(settings: Callable[..., Settings]) -> None:
    tower = Waiting()
    runner = TowerRunner(tower, settings())
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(runner.run, [images(4), images(4)]))
    assert (tower.runs, tower.met) == (2, False)


def test_a_capture_that_fails_names_the_setting(start: Start) -> None:
    with pytest.raises(SettingsError, match=r"setting 'execution'.*'eager', or 'graph_fallback' to true"):
        start(NoRecorder())


def test_a_capture_that_fails_may_fall_back(start: Start, tower: Doubling) -> None:
    runner = start(NoRecorder(), graph_fallback="true")
    assert not runner.captures
    assert only(runner.run(images(4))["image_embeds"]) == 2.0


def test_a_failure_of_the_tower_itself_is_not_blamed_on_a_setting(start: Start, tower: Doubling) -> None:
    tower.failing = True
    with pytest.raises(RuntimeError, match="the device is gone"):
        start(CallRecorder())


def test_kernels_are_tuned_for_a_usual_image_which_gets_no_graph(
    settings: Callable[..., Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # the runner sets it; the test puts it back
    tower = Compiled()
    runner = TowerRunner(tower, settings(compile="layers", compile_cache_folder=str(tmp_path)))
    runner.start(CallRecorder())
    assert tower.layouts[:2] == [(100,), (1, 1)]
    assert runner.captured == ((1, 1),)
