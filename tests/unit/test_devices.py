"""Devices that are not there or too small are refused with the setting to change and the bytes that are missing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from deepstack_serving import kv_pool
from deepstack_serving.checkpoint import Checkpoint, open_checkpoint
from deepstack_serving.errors import SettingsError
from deepstack_serving.injection import plan_stages
from deepstack_serving.kv_pool import KVPool, KVShape
from deepstack_serving.settings import parse_settings
from deepstack_serving.stages import loading
from deepstack_serving.stages.device import layers_on, stage_device
from deepstack_serving.stages.loading import load_language_stage, load_vision_stage

GIBIBYTE = 2**30
SHAPE = KVShape(heads=2, head_dim=16, dtype=torch.float32)


@pytest.fixture
def opened(checkpoint: Path) -> Checkpoint:
    return open_checkpoint(checkpoint, "auto")


def with_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.mark.parametrize(
    ("gpus", "settings", "text"),
    [
        (
            2,
            {"device": "cuda:2"},
            "setting 'device' places 'language_late' on cuda:2, but there are only cpu and cuda:0 to",
        ),
        (1, {"device": "cuda:1"}, "but there are only cpu and cuda:0$"),
        (
            1,
            {"device": "cuda:0", "devices": "language_late=cuda:3"},
            "setting 'devices' places 'language_late' on cuda:3",
        ),
        (0, {"device": "cuda:0"}, "on cuda:0, but (there is no CUDA device|this build of torch is for the CPU only)$"),
    ],
)
def test_device_that_is_not_there_is_refused_by_its_setting(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Path, gpus: int, settings: dict[str, str], text: str
) -> None:
    with_gpus(monkeypatch, gpus)
    with pytest.raises(SettingsError, match=text):
        stage_device(parse_settings({"checkpoint": str(checkpoint), **settings}), "language_late")


def test_other_models_device_is_not_looked_at(monkeypatch: pytest.MonkeyPatch, checkpoint: Path) -> None:
    with_gpus(monkeypatch, 1)
    settings = parse_settings({"checkpoint": str(checkpoint), "devices": "language_late=cuda:3"})
    assert stage_device(settings, "language_early") == "cuda:0"


def test_kv_pool_beyond_the_free_memory_is_refused_with_both_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_pool, "free_bytes", lambda _device: 10 * GIBIBYTE)
    text = "1000000 blocks (22.89 GiB) does not fit on cpu, which has 10.00 GiB free; lower 'kv_pool_tokens' or"
    with pytest.raises(SettingsError, match=re.escape(text)):
        KVPool(0, 6, 1_000_000, 16, SHAPE, "cpu")


def test_kv_pool_of_exactly_the_free_memory_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_pool, "free_bytes", lambda _device: 2 * 3 * 5 * 4 * 2 * 16 * 4)
    assert KVPool(0, 3, 5, 4, SHAPE, "cpu").blocks == 5


def failing_load(monkeypatch: pytest.MonkeyPatch, error: RuntimeError, free: int | None) -> None:
    def from_pretrained(*_: object, **__: object) -> object:
        raise error

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", from_pretrained)
    monkeypatch.setattr(loading, "free_bytes", lambda _device: free)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("issues during automatic conversion")]
)
def test_weights_beyond_the_free_memory_are_refused_with_both_sizes(
    monkeypatch: pytest.MonkeyPatch, opened: Checkpoint, error: RuntimeError
) -> None:
    failing_load(monkeypatch, error, free=1)
    plan = plan_stages(opened.layer_count, 2, (3,), opened.deepstack_layers)[1]
    text = r"GiB of weights do not fit on cuda:0, which had 0\.00 GiB free; .*'device' or 'devices', .*'split_points'"
    with pytest.raises(SettingsError, match=text):
        load_language_stage(opened, plan, "cuda:0", "eager")


def test_load_that_fails_for_another_reason_says_so(monkeypatch: pytest.MonkeyPatch, opened: Checkpoint) -> None:
    failing_load(monkeypatch, RuntimeError("issues during automatic conversion"), free=2**40)
    with pytest.raises(RuntimeError, match="issues during automatic conversion"):
        load_vision_stage(opened, "cuda:0")


def test_stages_of_all_pipelines_on_a_gpu_share_its_memory(monkeypatch: pytest.MonkeyPatch, checkpoint: Path) -> None:
    with_gpus(monkeypatch, 2)
    plans = plan_stages(36, 2, (8,), (0, 1, 2))
    pipelines = (("early", "late"), ("early_p2", "late_p2"))
    crossed = "early=cuda:0,late=cuda:1,early_p2=cuda:1,late_p2=cuda:0"
    for devices, first, second in (("", 72, 0), (crossed, 36, 36), ("early=cuda:1", 64, 8)):
        settings = parse_settings({"checkpoint": str(checkpoint), "devices": devices})
        assert layers_on("cuda:0", settings, plans, pipelines) == first
        assert layers_on("cuda:1", settings, plans, pipelines) == second
