"""On the real server: image features go from stage to stage on GPUs, decode steps by the host, answers are the same."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deepstack_serving.checkpoint import open_config
from deepstack_serving.embedded import EmbeddedServer
from deepstack_serving.injection import plan_stages
from deepstack_serving.stages.call import DTYPES
from deepstack_serving.wire import ModelInterface, language_interface
from tests.support.asking import picture
from tests.support.raw_client import Reply, ask, infer, request
from tests.support.server import serving

SPLIT = 1  # layers from 1 on take their features in the second stage
LANGUAGE = ("language_early", "language_late")
NEW_TOKENS = 16
PICTURES = [picture(1024, 1024, seed) for seed in range(4)]
HOST_ONLY = 2**40
CONTEXT_BYTES = 1536 * 2**20  # of one process that has a CUDA context and does not compute
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@dataclass(frozen=True)
class Served:
    """What one server answered, where its language stages' inputs came from, and the GPU memory in use then.

    `features` are the inputs of each language stage that carry image features.
    """

    alone: Reply
    together: list[Reply]
    features: Mapping[str, frozenset[str]]
    arrivals: Mapping[str, Mapping[str, int]]
    used_bytes: int


@pytest.fixture(scope="module")
def large_pictures(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint, taking images of 1,024 tokens: 256 KiB for each feature tensor."""
    folder = tmp_path_factory.mktemp("handover") / "checkpoint"
    shutil.copytree(checkpoint, folder)
    path = folder / "preprocessor_config.json"
    values = json.loads(path.read_text())
    if "longest_edge" in values["size"]:  # Granite's images are tiles of one size
        values["size"]["longest_edge"] = 1024 * 1024
    path.write_text(json.dumps(values))
    return folder


def served(checkpoint: Path, run_directory: Path, server_folder: Path | None, **settings: object) -> Served:
    chosen: dict[str, Any] = {
        "device": "cuda:0",
        "split_points": SPLIT,
        "execution": "eager",
        "compile": "off",
        "decode_steps_per_call": 1,
        "kv_pool_tokens": 8192,
        "gpu_tensor_bytes": 16_384,
        "vision_cache_bytes": 0,
        **settings,
    }
    with serving(checkpoint, run_directory, server_folder=server_folder, **chosen) as server:
        alone = ask(server, question(PICTURES[0]))
        with ThreadPoolExecutor(len(PICTURES)) as pool:
            together = list(pool.map(lambda image: ask(server, question(image)), PICTURES))
        arrivals = {name: arrivals_at(server, checkpoint, name) for name in LANGUAGE}
        free, total = torch.cuda.mem_get_info(0)
        features = {name: features_of(checkpoint, name) for name in LANGUAGE}
        return Served(alone, together, features, arrivals, total - free)


def question(image: bytes) -> dict[str, Any]:
    return request("describe the image", [image], logprobs=1, max_tokens=NEW_TOKENS)


def arrivals_at(server: EmbeddedServer, checkpoint: Path, name: str) -> dict[str, int]:
    """Calls of a language stage by input and device, as it counts them itself."""
    answer = infer(server, name, no_rows(interface_of(checkpoint, name)), ["stage_info"])["stage_info"]
    counts: dict[str, int] = json.loads(answer.tobytes())["arrivals"]
    return counts


def features_of(checkpoint: Path, name: str) -> frozenset[str]:
    inputs = {spec.name for spec in interface_of(checkpoint, name).inputs}
    return frozenset(feature for feature in inputs if feature == "image_embeds" or feature.startswith("ds_"))


def interface_of(checkpoint: Path, name: str) -> ModelInterface:
    opened = open_config(checkpoint)
    plans = plan_stages(opened.layer_count, 2, (SPLIT,), opened.contract.deepstack_layers)
    return language_interface(opened.contract, plans[LANGUAGE.index(name)])


def no_rows(interface: ModelInterface) -> dict[str, Any]:
    required = [spec for spec in interface.inputs if not spec.optional]
    return {
        spec.name: torch.zeros([max(size, 0) for size in spec.shape], dtype=DTYPES[spec.dtype]).numpy()
        for spec in required
    }


@pytest.fixture(scope="module")
def on_gpu(large_pictures: Path, tmp_path_factory: pytest.TempPathFactory, server_folder: Path | None) -> Served:
    return served(large_pictures, tmp_path_factory.mktemp("gpu"), server_folder)


@pytest.fixture(scope="module")
def on_host(large_pictures: Path, tmp_path_factory: pytest.TempPathFactory, server_folder: Path | None) -> Served:
    """The control: everything crosses by the host."""
    return served(large_pictures, tmp_path_factory.mktemp("host"), server_folder, gpu_tensor_bytes=HOST_ONLY)


@pytest.fixture(scope="module")
def on_two_gpus(
    large_pictures: Path, tmp_path_factory: pytest.TempPathFactory, server_folder: Path | None
) -> Iterator[Served]:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    yield served(
        large_pictures,
        tmp_path_factory.mktemp("two"),
        server_folder,
        devices="vision_encoder=cuda:0,language_early=cuda:0,language_late=cuda:1",
        micro_batches=1,
    )


def check_same(replies: list[Reply], expected: list[Reply], tolerance: float) -> None:
    assert [reply.token_ids for reply in replies] == [reply.token_ids for reply in expected]
    for reply, known in zip(replies, expected, strict=True):
        np.testing.assert_allclose(reply.logprobs, known.logprobs, rtol=0, atol=tolerance)


@pytest.mark.parametrize("stage", LANGUAGE)
def test_features_reach_a_stage_on_the_gpu_only(on_gpu: Served, stage: str) -> None:
    counts = {key: count for key, count in on_gpu.arrivals[stage].items() if key.split()[0] in on_gpu.features[stage]}
    assert set(counts) == {f"{name} cuda:0" for name in on_gpu.features[stage]}
    assert min(counts.values()) >= 2  # a step of the one alone, and at least one of those together


@pytest.mark.parametrize("stage", LANGUAGE)
def test_without_gpu_tensors_features_reach_a_stage_by_the_host(on_host: Served, stage: str) -> None:
    assert not [key for key in on_host.arrivals[stage] if not key.endswith(" cpu")]
    assert {f"{name} cpu" for name in on_host.features[stage]} <= set(on_host.arrivals[stage])


def test_hidden_states_of_prompts_stay_on_the_gpu_and_those_of_decode_steps_do_not(on_gpu: Served) -> None:
    counts = on_gpu.arrivals["language_late"]
    assert counts["hidden_states cuda:0"] >= 2  # one alone, and at least one prompt of those together
    assert counts["hidden_states cpu"] >= 2 * (NEW_TOKENS - 1)


def test_small_tensors_come_by_the_host(on_gpu: Served) -> None:
    small = ("position_ids", "query_lengths", "context_lengths", "block_tables", "sample_rows", "image_rows")
    devices = {key.split()[1] for key in on_gpu.arrivals["language_late"] if key.split()[0] in small}
    assert devices == {"cpu"}


def test_answers_are_those_of_features_that_crossed_by_the_host(on_gpu: Served, on_host: Served) -> None:
    check_same([on_gpu.alone], [on_host.alone], tolerance=0)
    check_same(on_gpu.together, on_host.together, tolerance=1e-3)  # steps hold other rows together


def test_pictures_asked_about_together_are_told_apart(on_gpu: Served) -> None:
    check_same(on_gpu.together[:1], [on_gpu.alone], tolerance=1e-3)
    assert len({tuple(reply.logprobs) for reply in on_gpu.together}) == len(PICTURES)


def test_forwarding_costs_no_more_than_a_context(
    on_gpu: Served, on_host: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stages have a context anyway; the orchestrator has one for what it forwards, and nothing else there."""
    cost = on_gpu.used_bytes - on_host.used_bytes
    with capsys.disabled():
        sys.stdout.write(f"\nGPU memory of forwarding: {cost / 2**20:.0f} MiB\n")
    assert cost < CONTEXT_BYTES


def test_second_gpu_takes_features_from_the_first(on_two_gpus: Served, on_gpu: Served) -> None:
    counts = on_two_gpus.arrivals["language_late"]
    assert {f"{name} cuda:0" for name in on_gpu.features["language_late"]} <= set(counts)
    assert not {f"{name} cpu" for name in on_gpu.features["language_late"]} & set(counts)
    check_same([on_two_gpus.alone], [on_gpu.alone], tolerance=1e-5)
