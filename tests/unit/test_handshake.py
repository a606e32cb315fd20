"""The stages must belong together, and to the orchestrator's checkpoint, before anything runs through them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from deepstack_serving.engine.handshake import check_stages
from deepstack_serving.errors import StageError, UnavailableError
from deepstack_serving.injection import plan_stages
from deepstack_serving.stages.info import StageInfo
from tests.support.asking import TEXT, answer, submit
from tests.support.local import LocalServer, local_settings

PLANS = plan_stages(6, 2, [2], (0, 1, 2))
VISION = StageInfo("vision_encoder", "f" * 64, "FP32", "cpu", "a")
EARLY = StageInfo("language_early", "f" * 64, "FP32", "cpu", "b", 0, 2, 10, 16)
LATE = StageInfo("language_late", "f" * 64, "FP32", "cpu", "c", 2, 6, 12, 16)


def test_stages_that_fit_pass() -> None:
    check_stages((VISION, EARLY, LATE), PLANS, "f" * 64)


@pytest.mark.parametrize(
    ("place", "change", "text"),
    [
        (0, {"fingerprint": "e" * 64}, "vision_encoder loaded another checkpoint: its fingerprint is eeeeeeeeeeee"),
        (2, {"fingerprint": "e" * 64}, "language_late loaded another checkpoint"),
        (1, {"dtype": "BF16"}, "language_early computes in BF16, vision_encoder in FP32"),
        (1, {"end_layer": 3}, "language_early holds the layers 0 to 3, the orchestrator expects 0 to 2"),
        (2, {"first_layer": 3}, "language_late holds the layers 3 to 6, the orchestrator expects 2 to 6"),
        (2, {"block_size": 8}, "language_late has KV blocks of 8 tokens, language_early of others"),
    ],
)
def test_stage_that_does_not_fit_is_named(place: int, change: dict[str, Any], text: str) -> None:
    infos = [VISION, EARLY, LATE]
    infos[place] = replace(infos[place], **change)
    with pytest.raises(StageError, match=text):
        check_stages(infos, PLANS, "f" * 64)


def test_info_crosses_as_bytes() -> None:
    assert StageInfo.from_bytes(bytes(LATE.to_tensor().tolist())) == LATE


def test_every_load_is_another_instance() -> None:
    assert StageInfo.new_instance() != StageInfo.new_instance()


def mismatched(_model: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
    if name != "stage_info":
        return tensor
    return replace(StageInfo.from_bytes(bytes(tensor.tolist())), fingerprint="other").to_tensor()


def test_requests_to_stages_that_do_not_fit_end_with_the_reason(checkpoint: Path) -> None:
    with LocalServer(local_settings(checkpoint, startup_timeout_s=0.01), change=mismatched) as server:
        error = submit(server, TEXT).wait().error
        assert not server.orchestrator.is_healthy
    assert isinstance(error, UnavailableError)
    assert "loaded another checkpoint" in str(error)


def test_stages_that_come_late_serve_what_waited(checkpoint: Path) -> None:
    refusals = [StageError("still loading")] * 2

    def late(model: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name == "stage_info" and model == "language_late" and refusals:
            raise refusals.pop()
        return tensor

    with LocalServer(local_settings(checkpoint), change=late) as server:
        assert len(answer(submit(server, TEXT)).ids) == 8
        assert server.orchestrator.is_healthy
