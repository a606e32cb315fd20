"""The vision encoder on the GPU: graphs equal eager runs to the bit, and all of it equals the CPU within rounding."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import AutoModel, Qwen3VLConfig

from deepstack_serving.checkpoint import open_checkpoint
from deepstack_serving.families.qwen3_vl_images import GridImageProcessing
from deepstack_serving.families.qwen3_vl_tower import GridTower
from deepstack_serving.families.vision_attention import SEGMENTS
from deepstack_serving.media import MediaFiles, decode
from deepstack_serving.stages.limits import image_limits
from deepstack_serving.stages.vision import VisionStage
from deepstack_serving.stages.vision_graphs import named
from tests.support.asking import picture
from tests.support.local import local_settings
from tests.support.videos import animation

SMALL, OTHER, WIDE, LARGE = picture(64, 64, 1), picture(64, 64, 5), picture(190, 40, 2), picture(150, 170, 3)
FILM = animation(6, 64, 64)  # the GPU host has no PyAV
ORDER: list[tuple[tuple[bytes, ...], tuple[bytes, ...]]] = [
    ((SMALL,), ()),
    ((LARGE,), ()),
    ((SMALL,), ()),  # captured
    ((OTHER,), ()),
    ((WIDE, SMALL), ()),
    ((LARGE,), ()),
    ((SMALL,), (FILM,)),
    ((WIDE, SMALL), ()),
    ((), (FILM,)),
    ((LARGE,), ()),
    ((SMALL,), ()),
]
ROUNDING = {torch.float32: 1e-2, torch.bfloat16: 0.06}  # of the largest feature, over the whole tower
grids = pytest.mark.parametrize("checkpoint", ["qwen3_vl", "qwen3_vl_moe"], indirect=True, scope="session")
bf16_grids = pytest.mark.parametrize("bf16_checkpoint", ["qwen3_vl", "qwen3_vl_moe"], indirect=True, scope="session")
Features = Mapping[str, torch.Tensor]


def encoder(checkpoint: Path, execution: str = "auto", compile_mode: str = "off", **values: object) -> VisionStage:
    options = {"device": "cuda:0", "vision_cache_bytes": 0, **values}
    settings = local_settings(checkpoint, execution=execution, compile=compile_mode, **options)
    return VisionStage(settings, open_checkpoint(checkpoint))


def encode(stage: VisionStage, images: tuple[bytes, ...], videos: tuple[bytes, ...] = ()) -> dict[str, torch.Tensor]:
    return stage.run(MediaFiles(images, videos), ["image_embeds"])


def assert_equal(mine: Features, theirs: Features) -> None:
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(mine[name], tensor), name


def assert_near(mine: Features, theirs: Features) -> None:
    """Within rounding of the largest value; another image is far away."""
    for name, tensor in theirs.items():
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        bound = ROUNDING[tensor.dtype] * float(tensor.abs().max())
        assert float((mine[name].cpu().float() - tensor.cpu().float()).abs().max()) < bound, name


def assert_graphs_equal_eager(checkpoint: Path, compile_mode: str = "off") -> None:
    graphs, eager = (encoder(checkpoint, execution, compile_mode) for execution in ("graph", "eager"))
    for images, videos in ORDER:
        assert_equal(encode(graphs, images, videos), encode(eager, images, videos))
    assert graphs.runner is not None
    assert eager.runner is not None
    assert len(graphs.runner.captured) == 8  # four examples, two sizes, two images together, the video
    assert (graphs.info.execution, eager.info.execution) == ("graph", "eager")
    assert eager.runner.captured == ()


@grids
def test_graphs_equal_eager_runs_in_full_precision(checkpoint: Path) -> None:
    assert_graphs_equal_eager(checkpoint)


@bf16_grids
def test_graphs_equal_eager_runs(bf16_checkpoint: Path) -> None:
    assert_graphs_equal_eager(bf16_checkpoint)


@bf16_grids
def test_compiled_graphs_equal_compiled_eager_runs(bf16_checkpoint: Path) -> None:
    assert_graphs_equal_eager(bf16_checkpoint, "layers")


@bf16_grids
def test_compiled_blocks_are_near_plain_ones(bf16_checkpoint: Path) -> None:
    compiled, plain = (encoder(bf16_checkpoint, compile_mode=mode) for mode in ("layers", "off"))
    assert compiled.info.compiled
    assert not plain.info.compiled
    for images, videos in ORDER:
        assert_near(encode(compiled, images, videos), encode(plain, images, videos))


def test_the_gpu_is_near_the_cpu(checkpoint: Path) -> None:
    gpu, cpu = encoder(checkpoint), encoder(checkpoint, device="cpu")
    for images in ((SMALL,), (LARGE,), (WIDE, SMALL), (SMALL,), (SMALL,)):
        mine = encode(gpu, images)
        assert_near(mine, encode(cpu, images))
        assert all(tensor.is_cuda == tensor.is_floating_point() for tensor in mine.values())
    with pytest.raises(AssertionError):
        assert_near(encode(gpu, (OTHER,)), encode(cpu, (SMALL,)))


@grids
def test_videos_on_the_gpu_are_near_those_on_the_cpu(checkpoint: Path) -> None:
    gpu, cpu = encoder(checkpoint), encoder(checkpoint, device="cpu")
    for _ in range(3):
        assert_near(encode(gpu, (), (FILM,)), encode(cpu, (), (FILM,)))


@bf16_grids
@pytest.mark.parametrize("compile_mode", ["off", "layers"])
def test_two_threads_do_not_mix_their_images(bf16_checkpoint: Path, compile_mode: str) -> None:
    stage, eager = encoder(bf16_checkpoint, "graph", compile_mode), encoder(bf16_checkpoint, "eager", compile_mode)
    files = [picture(64 + 32 * (seed % 3), 64, seed) for seed in range(6)]
    expected = [encode(eager, (file,)) for file in files]
    with ThreadPoolExecutor(2) as pool:  # the first ones capture while others prepare
        results = pool.map(lambda file: encode(stage, (file,)), files * 6)
        for features, wanted in zip(results, expected * 6, strict=True):
            assert_equal(features, wanted)


def test_features_in_the_cache_stay_as_they_were(bf16_checkpoint: Path) -> None:
    stage = encoder(bf16_checkpoint, vision_cache_bytes=2**24)
    first = {name: tensor.clone() for name, tensor in encode(stage, (SMALL,)).items()}
    for seed in range(5, 9):
        encode(stage, (picture(64, 64, seed),))
    assert_equal(encode(stage, (SMALL,)), first)


@grids
def test_pixels_are_looked_up_alike_on_both_devices(checkpoint: Path) -> None:
    processing, limits = GridImageProcessing(checkpoint), image_limits(local_settings(checkpoint))
    images = [decode(file, limits) for file in (SMALL, WIDE, LARGE)]
    on_gpu, on_cpu = (processing.prepare(images, device) for device in ("cuda:0", "cpu"))
    assert on_gpu["pixel_values"].is_cuda
    assert not on_gpu["image_grid_thw"].is_cuda
    assert_equal({name: tensor.cpu() for name, tensor in on_gpu.items()}, on_cpu)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_heads_of_72_values_without_a_wait(dtype: torch.dtype) -> None:
    visual = wide_tower(dtype)
    tower = GridTower(visual)
    grid = torch.tensor([[1, 12, 20], [1, 6, 4], [1, 2, 2]])
    pixels = torch.randn(int(grid.prod(-1).sum()), 1536, generator=torch.Generator().manual_seed(0))
    call = tower.arrange({"pixel_values": pixels, "image_grid_thw": grid})
    tower.run(call)
    torch.cuda.set_sync_debug_mode("error")
    try:
        features = named(tower.run(call))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    visual.config._attn_implementation = SEGMENTS
    cast(Any, tower)._flash = False
    assert_near(features, named(tower.run(call)))


def wide_tower(dtype: torch.dtype) -> Any:
    """Four blocks of the 8B model's width."""
    vision = {"depth": 4, "hidden_size": 1152, "num_heads": 16, "intermediate_size": 4304, "out_hidden_size": 64}
    config = Qwen3VLConfig(vision_config={**vision, "deepstack_visual_indexes": [0, 1, 2]}).vision_config
    torch.manual_seed(0)
    return AutoModel.from_config(config, attn_implementation="sdpa").eval().to("cuda:0", dtype)
