"""The tower without host work gives what transformers' own call gives, for images and videos, in every order."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.nn.functional import scaled_dot_product_attention

from deepstack_serving.checkpoint import Checkpoint, open_checkpoint
from deepstack_serving.execution.recorder import CallRecorder
from deepstack_serving.families import qwen3_vl_tower, vision_attention
from deepstack_serving.families.qwen3_vl_tower import GridTower, PatchProjection
from deepstack_serving.families.vision_tower import CapturableTower
from deepstack_serving.media import MediaFiles
from deepstack_serving.stages.loading import load_vision_stage
from deepstack_serving.stages.vision import VisionStage
from deepstack_serving.stages.vision_graphs import named
from tests.support.asking import picture
from tests.support.local import local_settings
from tests.support.videos import video

SMALL, WIDE, LARGE = picture(64, 64, 1), picture(190, 40, 2), picture(150, 170, 3)
TOLERANCE = 1e-3  # of one product in place of a convolution, over all blocks
GRIDS = [[[1, 4, 4]], [[1, 8, 2]], [[1, 4, 4], [1, 6, 10], [1, 2, 2]], [[1, 12, 12]]]
pytestmark = pytest.mark.parametrize("checkpoint", ["qwen3_vl", "qwen3_vl_moe"], indirect=True, scope="session")
Features = Mapping[str, torch.Tensor]


@pytest.fixture
def opened(checkpoint: Path) -> Checkpoint:
    return open_checkpoint(checkpoint)


@pytest.fixture
def model(opened: Checkpoint) -> nn.Module:
    """A fresh one: a tower takes its modules over."""
    return load_vision_stage(opened, "cpu")


def visual(model: nn.Module) -> Any:
    return cast(Any, model).model.visual


def inputs(model: nn.Module, grids: list[list[int]], kind: str = "image") -> dict[str, torch.Tensor]:
    grid = torch.tensor(grids)
    width = visual(model).patch_embed.proj.weight[0].numel()
    pixels = torch.randn(int(grid.prod(-1).sum()), width, generator=torch.Generator().manual_seed(len(grids)))
    names = {"image": ("pixel_values", "image_grid_thw"), "video": ("pixel_values_videos", "video_grid_thw")}[kind]
    return dict(zip(names, (pixels, grid), strict=True))


def tower_of(opened: Checkpoint, model: nn.Module) -> CapturableTower:
    tower = opened.family.capturable_tower(model)
    assert tower is not None
    return tower


def assert_equal(mine: Features, theirs: Features) -> None:
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def encoder(checkpoint: Path, *, recorded: bool, **values: object) -> VisionStage:
    settings = local_settings(checkpoint, vision_cache_bytes=0, compile="off", **values)
    stage = VisionStage(settings, open_checkpoint(checkpoint))
    if recorded:
        stage.start_tower(CallRecorder())
    return stage


def encode(stage: VisionStage, *files: bytes, videos: tuple[bytes, ...] = ()) -> dict[str, torch.Tensor]:
    return stage.run(MediaFiles(files, videos), ["image_embeds"])


@torch.inference_mode()
@pytest.mark.parametrize("grids", [*GRIDS, [[3, 4, 6]]], ids=str)
def test_features_are_those_of_transformers(opened: Checkpoint, model: nn.Module, grids: list[list[int]]) -> None:
    given = inputs(model, grids, "video" if grids[0][0] > 1 else "image")
    plain = named(opened.family.encode(model, given))
    visual(model).patch_embed.proj = PatchProjection(visual(model).patch_embed.proj)
    expected = named(opened.family.encode(model, given))
    tower = tower_of(opened, model)
    for _ in range(2):  # the second time the grids are known
        features = named(tower.run(tower.arrange(given)))
        assert_equal(features, expected)
    for name, tensor in plain.items():
        assert (features[name] - tensor).abs().max() < TOLERANCE
        assert tensor.abs().max() > 10 * TOLERANCE


@torch.inference_mode()
def test_a_run_reads_no_value_from_the_device(opened: Checkpoint, model: nn.Module) -> None:
    given = inputs(model, GRIDS[2])
    moved = {name: tensor.to("meta") for name, tensor in given.items()}
    model.to("meta")  # where no tensor has a value to read
    with pytest.raises((RuntimeError, NotImplementedError)):
        opened.family.encode(model, moved)
    tower = tower_of(opened, model)
    assert named(tower.run(tower.arrange(given)))["ds_0"].shape == (20, 64)


@torch.inference_mode()
def test_blocks_are_compiled_once_for_all_layers_and_sizes(
    opened: Checkpoint, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_image(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *_: object) -> torch.Tensor:
        first, second, third = (tensor.transpose(0, 1)[None] for tensor in (queries, keys, values))
        return scaled_dot_product_attention(first, second, third)[0].transpose(0, 1)

    monkeypatch.setattr(vision_attention, "varlen_attn", one_image)
    monkeypatch.setattr(qwen3_vl_tower, "fits_flash", lambda *_: True)
    tower = tower_of(opened, model)
    calls = [tower.arrange(inputs(model, [[1, side, 10]])) for side in (4, 6, 8, 12, 20)]
    expected = [named(tower.run(call)) for call in calls]
    counter = CompileCounter()
    torch._dynamo.reset()
    tower.compile_blocks(partial(torch.compile, backend=counter, dynamic=True, fullgraph=True))
    for call, features in zip(calls, expected, strict=True):
        assert_equal(named(tower.run(call)), features)
    assert counter.frame_count == 1


def test_recorded_runs_equal_plain_ones_in_any_order(checkpoint: Path) -> None:
    plain, recorded = encoder(checkpoint, recorded=False), encoder(checkpoint, recorded=True)
    film = video(6, 64, 64, seed=4)
    first: dict[object, dict[str, torch.Tensor]] = {}
    for files, videos in [
        ((SMALL,), ()),
        ((LARGE,), ()),
        ((SMALL,), ()),
        ((WIDE, SMALL), ()),
        ((SMALL,), ()),
        ((), (film,)),
        ((LARGE,), ()),
        ((WIDE, SMALL), (film,)),
        ((WIDE, SMALL), ()),
        ((), (film,)),
        ((LARGE, SMALL), ()),
        ((SMALL,), ()),
    ]:
        features = encode(recorded, *files, videos=videos)
        assert_equal(features, first.setdefault((files, videos), features))
        for name, tensor in encode(plain, *files, videos=videos).items():
            assert torch.allclose(features[name], tensor, rtol=0, atol=TOLERANCE), name
    assert recorded.runner is not None
    assert len(recorded.runner.captured) == 8  # four examples, two sizes, two images together, the video
    assert (recorded.info.execution, plain.info.execution) == ("graph", "eager")


def test_another_image_gives_other_features(checkpoint: Path) -> None:
    stage = encoder(checkpoint, recorded=True)
    mine, other = (encode(stage, picture(64, 64, seed)) for seed in (1, 5))
    assert all((mine[name] - other[name]).abs().max() > 10 * TOLERANCE for name in mine if name.startswith("ds_"))


def test_threads_do_not_mix_their_images(checkpoint: Path) -> None:
    stage = encoder(checkpoint, recorded=True)
    files = [picture(64, 64, seed) for seed in range(4)]
    expected = [encode(stage, file) for file in files]
    with ThreadPoolExecutor(4) as pool:
        for features, wanted in zip(pool.map(lambda file: encode(stage, file), files * 5), expected * 5, strict=True):
            assert_equal(features, wanted)


def test_the_cache_keeps_what_a_recorded_run_gave(checkpoint: Path) -> None:
    settings = local_settings(checkpoint, compile="off")
    stage = VisionStage(settings, open_checkpoint(checkpoint))
    stage.start_tower(CallRecorder())
    before = encode(stage, SMALL)
    encode(stage, picture(64, 64, 9)), encode(stage, picture(64, 64, 10))
    assert_equal(encode(stage, SMALL), before)


def test_features_that_are_not_finite_are_named(checkpoint: Path) -> None:
    from deepstack_serving.errors import StageError

    stage = encoder(checkpoint, recorded=True)
    with torch.inference_mode():
        cast(Any, stage)._model.model.visual.deepstack_merger_list[1].linear_fc2.bias.fill_(float("nan"))
    with pytest.raises(StageError, match="'ds_1'"):
        encode(stage, SMALL)


def test_grid_tower_is_what_is_tested(opened: Checkpoint, model: nn.Module) -> None:
    assert isinstance(tower_of(opened, model), GridTower)
