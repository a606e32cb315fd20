"""Which checkpoints take videos, and what a request with one is told where they are not taken."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deepstack_serving.checkpoint import open_checkpoint
from deepstack_serving.engine.media_intake import MediaIntake
from deepstack_serving.errors import CheckpointError, InvalidRequestError, WireError
from deepstack_serving.media import MediaFiles, VideoSampling
from deepstack_serving.stages.media_call import media_files, media_tensors
from deepstack_serving.wire import vision_interface
from tests.support.asking import picture
from tests.support.local import local_settings
from tests.support.tiny import write_checkpoint
from tests.support.tiny_granite import write_granite_checkpoint
from tests.support.videos import animation

FILM = animation(4)


@pytest.fixture(scope="module")
def granite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_granite_checkpoint(tmp_path_factory.mktemp("granite"))


@pytest.fixture(scope="module")
def pictures_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_checkpoint(tmp_path_factory.mktemp("pictures"))
    (folder / "video_preprocessor_config.json").unlink()
    return folder


def intake(folder: Path) -> MediaIntake:
    return MediaIntake(local_settings(folder), open_checkpoint(folder))


def declared(folder: Path) -> set[str]:
    interface = vision_interface(open_checkpoint(folder).contract)
    return {spec.name for spec in (*interface.inputs, *interface.outputs) if "video" in spec.name}


def test_family_without_videos_refuses_them_by_name(granite: Path) -> None:
    with pytest.raises(InvalidRequestError, match="has a video, but granite4_vision models take no video"):
        intake(granite).probe_videos([FILM], VideoSampling())
    assert declared(granite) == set()


def test_checkpoint_without_a_video_processor_takes_images_only(pictures_only: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"this checkpoint has no video_preprocessor_config\.json"):
        intake(pictures_only).probe_videos([FILM], VideoSampling())
    assert intake(pictures_only).probe_images([picture(64, 64)])[1] == [4]
    assert declared(pictures_only) == set()


def test_checkpoint_with_a_video_processor_declares_videos(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    assert declared(folder) == {"video", "video_sampling", "video_grid_thw", "video_tokens"}


def test_video_processor_may_stand_in_the_processors_file(pictures_only: Path, tmp_path: Path) -> None:
    for path in pictures_only.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "processor_config.json").write_text('{"video_processor": {"patch_size": 16, "max_frames": 3}}')
    [plan] = intake(tmp_path).probe_videos([animation(40)], VideoSampling())[1]
    assert plan.text.count("seconds>") == 2


def test_patches_of_another_size_than_the_models_are_refused(pictures_only: Path, tmp_path: Path) -> None:
    for path in pictures_only.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "video_preprocessor_config.json").write_text('{"patch_size": 14}')
    with pytest.raises(CheckpointError, match=r"video_preprocessor_config\.json: patch_size is 14, but config\.json"):
        open_checkpoint(tmp_path).family.video_processing(tmp_path)


@pytest.mark.parametrize("values", [(2.0, 4.0), (-1.0, 0.0), (0.0, 1.5), (float("nan"), 0.0), (0.0, 1e30)])
def test_a_call_with_impossible_sampling_is_refused(values: tuple[float, float]) -> None:
    with pytest.raises(WireError, match="'video_sampling' is"):
        media_files({"video": [FILM], "video_sampling": torch.tensor(values)})


def test_zero_means_not_given() -> None:
    assert media_files({"video": [FILM], "video_sampling": torch.tensor([0.0, 6.0])}) == MediaFiles(
        (), (FILM,), VideoSampling(None, 6)
    )


@pytest.mark.parametrize("coming", [(), (b"first", b"second")])
def test_files_of_a_call_come_back_from_its_tensors(coming: tuple[bytes, ...]) -> None:
    files = MediaFiles((b"one", b"two"), coming=coming)
    inputs = {name: list(array) for name, array in media_tensors(files).items()}
    assert set(inputs) == {"image", *(["coming_images"] if coming else [])}
    assert media_files(inputs) == files
