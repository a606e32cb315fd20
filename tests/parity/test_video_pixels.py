"""The two functions that stand for torchvision's: pixels as transformers' processor gave them with torchvision 0.28."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from deepstack_serving.families.qwen3_vl_video import GridVideoProcessing
from tests.support.tiny import write_json

# Every 4,001st value in 0 to 255 of three frames, by frame size: made smaller, made larger, left as it is.
RECORDED: dict[tuple[int, int], tuple[list[int], list[int]]] = {
    (150, 110): ([2, 4, 6], [3, 192, 198, 184, 216, 85, 81, 113, 142, 43, 0, 48, 163, 191, 233, 91, 123, 44, 246]),
    (40, 30): ([2, 4, 6], [0, 146, 148, 30, 243, 89, 238, 195, 117, 79, 126, 54, 237, 159, 239, 218, 109, 18, 174]),
    (96, 96): (
        [2, 6, 6],
        [
            0,
            193,
            46,
            229,
            226,
            207,
            144,
            141,
            124,
            177,
            46,
            47,
            92,
            75,
            0,
            45,
            207,
            182,
            101,
            130,
            127,
            46,
            133,
            52,
            177,
            78,
            253,
            228,
        ],
    ),
}


def ramps(width: int, height: int) -> npt.NDArray[np.uint8]:
    """Three frames that rise by other steps in each direction and colour, and fall back to 0 at 256."""
    time, row, column, colour = np.ogrid[:3, :height, :width, :3]
    return ((40 * time + 3 * row + 5 * column + 70 * colour) % 256).astype(np.uint8)


@pytest.fixture(scope="module")
def processing(tmp_path_factory: pytest.TempPathFactory) -> GridVideoProcessing:
    folder = tmp_path_factory.mktemp("video")
    pixels = {
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    limits = {"size": {"shortest_edge": 12_000, "longest_edge": 36_000}}
    write_json(folder / "video_preprocessor_config.json", {**pixels, **limits})
    return GridVideoProcessing(folder)


@pytest.mark.parametrize("size", RECORDED)
def test_pixels_are_those_of_torchvision(processing: GridVideoProcessing, size: tuple[int, int]) -> None:
    grid, levels = RECORDED[size]
    inputs = processing.prepare(ramps(*size))
    assert inputs["video_grid_thw"].tolist() == [grid]
    sampled = inputs["pixel_values_videos"].flatten()[::4001] * 127.5 + 127.5
    # Machines without AVX2 round otherwise in the last place.
    assert torch.allclose(sampled, torch.tensor(levels, dtype=torch.float32), rtol=0, atol=1.01)
