"""Pixels that are looked up on the tower's device are those of the checkpoint's processor, to the bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from deepstack_serving.errors import InvalidRequestError
from deepstack_serving.families.qwen3_vl_images import GridImageProcessing

GENERATOR = np.random.default_rng(0)
SIZES = [
    (64, 64),  # already fits
    (256, 192),
    (32, 32),  # enlarged
    (1, 1),
    (3, 199),
    (199, 1),
    (1024, 1024),  # made smaller
    (1333, 77),
    *(tuple(pair) for pair in GENERATOR.integers(8, 500, (24, 2)).tolist()),
]
CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
CHANGES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "other means": CLIP,
    "no normalising": {"do_normalize": False},
    "no rescaling": {"do_rescale": False, "image_mean": [127.0] * 3, "image_std": [50.0, 60.0, 70.0]},
    "neither": {"do_rescale": False, "do_normalize": False},
    "other factor": {"rescale_factor": 1 / 127.5, "image_mean": [1.0] * 3},
    "other filter": {"resample": 2},
    "other sizes": {"size": {"shortest_edge": 1024, "longest_edge": 20_000}},
}
NOT_KNOWN: dict[str, dict[str, Any]] = {"no resizing": {"do_resize": False}}


def picture(size: tuple[int, int]) -> Image.Image:
    """Every byte in every channel, and edges that a filter shows."""
    return Image.fromarray(np.random.default_rng(sum(size)).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))


def changed(checkpoint: Path, folder: Path, changes: dict[str, Any]) -> Path:
    copy = Path(shutil.copytree(checkpoint, folder / "copy"))
    path = copy / "preprocessor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return copy


def expected(folder: Path, images: list[Image.Image]) -> dict[str, torch.Tensor]:
    return dict(AutoImageProcessor.from_pretrained(folder, backend="pil")(images=images, return_tensors="pt"))


def assert_same(processing: GridImageProcessing, folder: Path, images: list[Image.Image]) -> None:
    mine, theirs = processing.prepare(images), expected(folder, images)
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert mine[name].dtype == tensor.dtype
        assert torch.equal(mine[name], tensor), name


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES.keys())
def test_pixels_are_the_processors_whatever_its_files_say(
    checkpoint: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    folder = changed(checkpoint, tmp_path, changes)
    processing = GridImageProcessing(folder)
    assert processing.by_table
    for size in SIZES if not changes else SIZES[:6]:
        assert_same(processing, folder, [picture(size)])
    assert_same(processing, folder, [picture(size) for size in SIZES[:4]])


@pytest.mark.parametrize("changes", NOT_KNOWN.values(), ids=NOT_KNOWN.keys())
def test_what_is_not_known_is_left_to_the_processor(checkpoint: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = changed(checkpoint, tmp_path, changes)
    processing = GridImageProcessing(folder)
    assert not processing.by_table
    assert_same(processing, folder, [picture((64, 64)), picture((96, 32))])


@pytest.mark.parametrize("patch_size", [8, 14, 16])
def test_patches_of_other_sizes(checkpoint: Path, tmp_path: Path, patch_size: int) -> None:
    folder = changed(
        checkpoint, tmp_path, {"patch_size": patch_size, "size": {"shortest_edge": 64, "longest_edge": 50_000}}
    )
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["patch_size"] = patch_size
    (folder / "config.json").write_text(json.dumps(config))
    processing = GridImageProcessing(folder)
    for size in SIZES[:6]:
        assert_same(processing, folder, [picture(size)])


def test_a_processor_of_another_class_is_used_as_it_is(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = AutoImageProcessor.from_pretrained(checkpoint, backend="pil")
    other = type("Other", (type(real),), {"patchify": lambda self, image, **_: (np.zeros((4, 2), np.float32), 2, 2)})
    monkeypatch.setattr(AutoImageProcessor, "from_pretrained", lambda *_, **__: other(**real.to_dict()))
    processing = GridImageProcessing(checkpoint)
    assert not processing.by_table
    assert processing.prepare([picture((64, 64))])["pixel_values"].shape == (4, 2)


def test_a_size_that_cannot_be_encoded_is_the_clients_mistake(checkpoint: Path) -> None:
    processing = GridImageProcessing(checkpoint)
    with pytest.raises(InvalidRequestError, match="4000x2 pixels"):
        processing.fit(picture((4000, 2)))
