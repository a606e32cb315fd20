"""Calls to a stage are answered whatever happens in them: results, errors of one call, and a device that is lost."""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from deepstack_serving.errors import StageError, UnavailableError
from deepstack_serving.stages.device import DeviceGuard
from deepstack_serving.stages.info import StageInfo
from tests.support.bridge import GpuTensor, Request, Tensor, array, error_code, import_bridge, values

GIBIBYTE = 2**30
GPU = "cuda:0"


class Stage:
    """Answers with its inputs; each of `faults` is raised by one call, in order, None by none."""

    def __init__(self, *faults: Exception | None, device: str = "cpu") -> None:
        self.faults, self.calls = list(faults), 0
        self.info = StageInfo("language_early", "f" * 64, "FP32", device, "a", 0, 2, 10, 16)

    def run(self, inputs: Mapping[str, Any], outputs: Sequence[str]) -> dict[str, torch.Tensor]:
        self.calls += 1
        fault = self.faults.pop(0) if self.faults else None
        if fault is not None:
            raise fault
        return {"stage_info": self.info.to_tensor()} if self.info.answers(outputs) else dict(inputs)


@pytest.fixture
def bridge(monkeypatch: pytest.MonkeyPatch) -> Any:
    return import_bridge(monkeypatch)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A GPU that lives while this list, of what it says when asked, is empty."""
    sayings: list[str] = []

    def synchronize(_device: str) -> None:
        if sayings:
            raise RuntimeError(sayings[0])

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (3 * GIBIBYTE, 8 * GIBIBYTE))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: 2 * GIBIBYTE)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _device: GIBIBYTE)
    return sayings


def call(bridge: Any, stage: Stage) -> Any:
    """Answers for a stage, and a way to send it one call."""
    answers = bridge.StageAnswers(stage.run, stage.info, 0)
    return lambda *outputs: answers.to([Request({"hidden_states": array(1, 2)}, outputs or ["hidden_states"])])[0]


def test_answer_holds_what_was_asked_for_and_is_there(bridge: Any) -> None:
    stage = Stage()
    inputs = {"a": array(1), "b": array(2), "c": array(3)}
    answers = bridge.StageAnswers(stage.run, stage.info, 0)
    assert values(answers.to([Request(inputs, ["c", "ds_0", "a"])])[0]) == {"c": [3], "a": [1]}


def test_call_that_fails_leaves_the_others_their_results(bridge: Any) -> None:
    stage = Stage(None, ValueError("odd"), None)
    requests = [Request({"a": array(number)}, ["a"]) for number in range(3)]
    responses = bridge.StageAnswers(stage.run, stage.info, 0).to(requests)
    assert [error_code(response) for response in responses] == [None, "INTERNAL", None]
    assert values(responses[2]) == {"a": [2]}


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_out_of_memory_ends_one_call_and_may_be_tried_again(bridge: Any, gpu: list[str], device: str) -> None:
    send = call(bridge, Stage(torch.OutOfMemoryError("CUDA out of memory"), device=device))
    failed = send()
    assert error_code(failed) == "UNAVAILABLE"
    assert f"language_early ran out of memory on {device}" in failed.error.text
    assert ("which has 4.00 GiB free without it" in failed.error.text) == (device == GPU)
    assert values(send()) == {"hidden_states": [1, 2]}


def test_memory_of_the_call_that_ran_out_of_it_is_free_again(gpu: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[weakref.ref[torch.Tensor]] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: held.append(held[0]) if held[0]() is None else None)

    def run() -> None:
        activations = torch.zeros(4)
        held.append(weakref.ref(activations))
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(UnavailableError), DeviceGuard("language_early", GPU).watch():
        run()
    assert len(held) == 2  # nothing held the tensor when the cache was emptied


def test_lost_device_answers_nothing_more_not_even_what_it_is(bridge: Any, gpu: list[str]) -> None:
    stage = Stage(RuntimeError("illegal memory access"), device=GPU)
    send = call(bridge, stage)
    gpu.append("CUDA error: an illegal memory access was encountered\nSearch for ...")
    responses = [send(), send(), send("stage_info")]
    assert [error_code(response) for response in responses] == ["INTERNAL"] * 3
    assert "lost cuda:0 (CUDA error: an illegal memory access was encountered): unload" in responses[2].error.text
    assert stage.calls == 1


def test_error_that_the_device_survives_ends_one_call(bridge: Any, gpu: list[str]) -> None:
    send = call(bridge, Stage(RuntimeError("shapes do not match"), device=GPU))
    assert [error_code(send()), error_code(send())] == ["INTERNAL", None]


def test_stage_counts_the_calls_by_input_and_device(bridge: Any) -> None:
    send = call(bridge, Stage())
    for outputs in (["hidden_states"], ["hidden_states"], ["stage_info"]):
        response = send(*outputs)
    info = json.loads(bytes(values(response)["stage_info"]))
    assert info["arrivals"] == {"hidden_states cpu": 2}


def test_counts_do_not_make_another_stage(bridge: Any) -> None:
    stage = Stage()
    before = StageInfo.from_bytes(bytes(stage.info.to_tensor().tolist()))
    call(bridge, stage)()
    after = StageInfo.from_bytes(bytes(stage.info.to_tensor().tolist()))
    assert (after, after.arrivals) == (before, {"hidden_states cpu": 1})


def test_features_on_a_gpu_are_passed_on_and_never_joined(bridge: Any) -> None:
    port, handle = bridge.TritonStagePort(), GpuTensor("ds_0", array(1))
    assert not port.is_on_host(handle)
    assert port.join("ds_0", [handle]) is handle
    with pytest.raises(StageError, match="'ds_0' of several requests stays on a GPU"):
        port.join("ds_0", [Tensor("ds_0", array(2)), handle])


def test_features_on_the_host_are_joined_in_order(bridge: Any) -> None:
    port = bridge.TritonStagePort()
    parts = [Tensor("ds_0", array(1)), Tensor("ds_0", array(2, 3))]
    assert all(map(port.is_on_host, parts))
    assert port.array(port.join("ds_0", parts)).tolist() == [1, 2, 3]
