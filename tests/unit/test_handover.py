"""Which tensors leave a stage on its GPU, and that their values are there when they do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import pytest
import torch

from deepstack_serving.stages.handover import ready_to_send

LIMIT = 1000


class OnGpu:
    """As much of a tensor on a GPU as handing over may touch; what happens to it is written down."""

    is_cuda = True

    def __init__(self, log: list[str], nbytes: int, device: str = "cuda:0") -> None:
        self.log, self.nbytes, self.device = log, nbytes, device

    def detach(self) -> OnGpu:
        return self

    def contiguous(self) -> OnGpu:
        self.log.append("contiguous")
        return self

    def to(self, place: str, non_blocking: bool) -> str:
        self.log.append(f"copy to {place}{'' if non_blocking else ', waiting'}")
        return place


class Stream:
    """Writes down that it was waited for."""

    def __init__(self, log: list[str], device: str) -> None:
        self.log, self.device = log, device

    def synchronize(self) -> None:
        self.log.append(f"wait for {self.device}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    entries: list[str] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(entries, device))
    return entries


def send(tensors: Mapping[str, OnGpu | torch.Tensor], limit: int = LIMIT) -> Mapping[str, Any]:
    return ready_to_send(cast(Mapping[str, torch.Tensor], tensors), limit)


@pytest.mark.parametrize("name", ["ds_0", "image_embeds", "hidden_states"])
@pytest.mark.parametrize(("nbytes", "stays"), [(LIMIT - 1, False), (LIMIT, True), (LIMIT + 1, True)])
def test_forwarded_tensor_stays_on_its_gpu_from_the_limit_on(
    log: list[str], name: str, nbytes: int, stays: bool
) -> None:
    tensor = OnGpu(log, nbytes)
    assert send({name: tensor})[name] == (tensor if stays else "cpu")


@pytest.mark.parametrize("name", ["next_ids", "logprobs", "top_logprobs", "image_grid_thw", "stage_info"])
def test_tensor_that_the_orchestrator_reads_goes_to_the_host_at_any_size(log: list[str], name: str) -> None:
    assert send({name: OnGpu(log, 2**40)}, limit=0)[name] == "cpu"


def test_empty_tensor_goes_to_the_host(log: list[str]) -> None:
    assert send({"hidden_states": OnGpu(log, 0)}, limit=0)["hidden_states"] == "cpu"


def test_all_copies_are_started_before_the_one_wait(log: list[str]) -> None:
    send({"next_ids": OnGpu(log, 8), "ds_3": OnGpu(log, LIMIT), "logprobs": OnGpu(log, 4)})
    assert log == ["contiguous", "copy to cpu", "contiguous", "contiguous", "copy to cpu", "wait for cuda:0"]


def test_each_gpu_is_waited_for(log: list[str]) -> None:
    send({"ds_1": OnGpu(log, LIMIT), "ds_2": OnGpu(log, LIMIT, "cuda:1")})
    assert log[2:] == ["wait for cuda:0", "wait for cuda:1"]


def test_host_tensor_needs_no_gpu(log: list[str]) -> None:
    turned = torch.arange(6.0).reshape(2, 3).t()
    sent = send({"ds_0": turned})["ds_0"]
    assert sent.is_contiguous()
    assert torch.equal(sent, turned)
    assert log == []
