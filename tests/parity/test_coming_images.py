"""Images that a call of the encoder says are to follow: decoded meanwhile, once, and answered as if it had not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deepstack_serving.media import MediaFiles, decoding
from deepstack_serving.stages.vision import VisionStage
from tests.support.asking import picture
from tests.support.local import STAGE_NAMES, LocalPort, local_settings

FIRST, SECOND, THIRD = (picture(64, 64, seed) for seed in (1, 2, 3))


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    files: list[bytes] = []
    decode = decoding.decode

    def noted(data: bytes, limits: object) -> object:
        files.append(data)
        return decode(data, limits)  # type: ignore[arg-type]

    monkeypatch.setattr(decoding, "decode", noted)
    return files


def encode(stage: VisionStage, *images: bytes, coming: tuple[bytes, ...] = ()) -> dict[str, torch.Tensor]:
    wanted = [spec.name for spec in stage.interface.outputs if spec.name != "stage_info"]
    return stage.run(MediaFiles(images, coming=coming), wanted)


def assert_equal(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    for name, tensor in theirs.items():
        assert torch.equal(mine[name], tensor), name


def test_coming_images_are_decoded_once_and_change_nothing(checkpoint: Path, decoded: list[bytes]) -> None:
    stage = LocalPort(local_settings(checkpoint, vision_cache_bytes=0), STAGE_NAMES[1]).vision
    alone = [encode(stage, image) for image in (FIRST, SECOND, THIRD)]
    decoded.clear()
    assert_equal(encode(stage, FIRST, coming=(SECOND, b"junk", THIRD)), alone[0])
    assert_equal(encode(stage, SECOND, coming=(THIRD,)), alone[1])
    assert_equal(encode(stage, THIRD), alone[2])
    assert decoded == [FIRST, SECOND, THIRD]


def test_an_image_of_the_call_itself_is_not_decoded_again(checkpoint: Path, decoded: list[bytes]) -> None:
    stage = LocalPort(local_settings(checkpoint), STAGE_NAMES[1]).vision
    encode(stage, FIRST, coming=(FIRST, SECOND))
    encode(stage, SECOND)
    assert decoded == [FIRST, SECOND]


def test_images_with_features_in_the_cache_are_not_decoded(checkpoint: Path, decoded: list[bytes]) -> None:
    stage = LocalPort(local_settings(checkpoint), STAGE_NAMES[1]).vision
    encode(stage, SECOND)
    encode(stage, FIRST, coming=(SECOND,))
    encode(stage, SECOND)
    assert decoded == [SECOND, FIRST]
