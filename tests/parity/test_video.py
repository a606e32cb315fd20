"""Videos: prompts, positions and answers are those of transformers' processor and unsplit model, at every split."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.video_utils import VideoMetadata

from deepstack_serving.checkpoint import open_checkpoint
from deepstack_serving.engine.request import parse_request
from deepstack_serving.engine.sampling_parameters import SamplingParameters
from deepstack_serving.media import MediaFiles, VideoHeader, VideoSampling
from deepstack_serving.stages.vision import VisionStage
from tests.parity.test_controls import first_token_shift
from tests.parity.test_reference import TOLERANCE, assert_close, prepare
from tests.support.asking import MIXED, Answer, Ask, ask_alone, ask_together, picture
from tests.support.local import Change, LocalServer, keep, local_settings, zero_deepstack
from tests.support.reference import Reference
from tests.support.runs import Run
from tests.support.videos import frame_files, frame_list, video

FILM = Ask("what happens in the video?", videos=(video(9),))
ODD = Ask("and now?", videos=(video(9, 100, 70, seed=1),), sampling=(("video_fps", 10.0),))
COUNTED = Ask("describe it.", videos=(video(14, 64, 96, seed=2),), sampling=(("video_num_frames", 5),))
BOTH = Ask("compare", (picture(100, 70, 1), picture(64, 64, 2)), (video(8, 64, 64, seed=3), video(21, seed=4)))
TURNED = Ask("in turn", BOTH.images, BOTH.videos, order=("video", "image", "image", "video"))
VIDEOS = (FILM, ODD, COUNTED, BOTH, TURNED)
SPLITS = [*((2, str(point)) for point in range(7)), (4, "balanced")]
pytestmark = pytest.mark.parametrize("checkpoint", ["qwen3_vl", "qwen3_vl_moe"], indirect=True, scope="session")


def run_videos(checkpoint: Path, stages: int = 2, change: Change = keep, **settings: object) -> Run:
    """The answers to all videos, a picture and a text, in one batch and alone."""
    asks = (*VIDEOS, *MIXED[:2])
    with LocalServer(local_settings(checkpoint, **settings), stages, change, held=True) as server:
        return Run(ask_together(server, asks), ask_alone(server, asks))


@pytest.fixture(scope="module")
def uncut(checkpoint: Path) -> Run:
    return run_videos(checkpoint, stages=1)


@pytest.fixture(scope="module")
def answers(checkpoint: Path, reference: Reference) -> list[Answer]:
    return [reference.generate(ask) for ask in (*VIDEOS, *MIXED[:2])]


@pytest.mark.parametrize("ask", VIDEOS, ids=lambda ask: ask.text)
def test_prompt_ids_are_those_of_the_processor(checkpoint: Path, reference: Reference, ask: Ask) -> None:
    assert prepare(checkpoint, ask).input_ids.tolist() == reference.prompt(ask).input_ids.tolist()


@pytest.mark.parametrize("ask", VIDEOS, ids=lambda ask: ask.text)
def test_positions_are_those_of_the_model(checkpoint: Path, reference: Reference, ask: Ask) -> None:
    opened, expected = open_checkpoint(checkpoint), reference.prompt(ask)
    sampling = parse_request(ask.inputs, {}, SamplingParameters()).video_sampling
    names = ["image_grid_thw", "video_grid_thw"]
    sizes = VisionStage(local_settings(checkpoint), opened).run(MediaFiles(ask.images, ask.videos, sampling), names)
    grids = [sizes[name].numpy() for name in names]
    positions = opened.family.positions(opened.config, prepare(checkpoint, ask).input_ids, *grids)
    assert (positions.prompt.tolist(), positions.delta) == (expected.positions.tolist(), expected.delta)


def test_pixels_are_those_of_the_processor(checkpoint: Path, reference: Reference) -> None:
    processing = open_checkpoint(checkpoint).family.video_processing(checkpoint)
    expected = reference.inputs(FILM)
    header = VideoHeader(9, 10.0, 96, 64)
    frames, _ = reference.video(FILM.videos[0], {})
    assert processing.sample(header, VideoSampling()) == (0, 3, 5, 8)
    assert torch.equal(processing.prepare(frames)["pixel_values_videos"], expected["pixel_values_videos"])


def test_frames_are_sampled_as_transformers_does(checkpoint: Path, reference: Reference) -> None:
    processing = open_checkpoint(checkpoint).family.video_processing(checkpoint)
    rule = reference.processor.video_processor.sample_frames
    choices = [(None, None), (0.5, None), (3.0, None), (None, 2), (None, 7), (None, 30)]
    for total, rate, (fps, count) in product((2, 3, 4, 5, 17, 100, 1001), (0.5, 5.0, 23.976, 60.0), choices):
        metadata = VideoMetadata(total_num_frames=total, fps=rate)
        indices = processing.sample(VideoHeader(total, rate, 96, 64), VideoSampling(fps, count))
        assert indices == tuple(rule(metadata, num_frames=count, fps=fps).tolist())


def test_one_stage_equals_generate(uncut: Run, answers: list[Answer]) -> None:
    assert_close(uncut.together + uncut.alone, answers * 2)


@pytest.mark.parametrize(("stages", "points"), SPLITS)
def test_split_equals_unsplit(checkpoint: Path, uncut: Run, stages: int, points: str) -> None:
    assert run_videos(checkpoint, stages, split_points=points) == uncut


@pytest.fixture(scope="module")
def uncut_bf16(checkpoint: Path) -> Run:
    return run_videos(checkpoint, stages=1, dtype="bfloat16")


@pytest.mark.parametrize(("stages", "points"), SPLITS)
def test_split_equals_unsplit_in_bfloat16(checkpoint: Path, uncut_bf16: Run, stages: int, points: str) -> None:
    assert run_videos(checkpoint, stages, split_points=points, dtype="bfloat16") == uncut_bf16


def test_bfloat16_is_another_number_type(uncut: Run, uncut_bf16: Run) -> None:
    assert uncut != uncut_bf16


@pytest.mark.parametrize("budget", [5, 17])
def test_chunks_that_end_inside_a_video_equal_generate(checkpoint: Path, answers: list[Answer], budget: int) -> None:
    chunked = run_videos(checkpoint, prefill_token_budget=budget)
    assert_close(chunked.together + chunked.alone, answers * 2)


def test_zeroed_deepstack_changes_the_answers_about_videos(checkpoint: Path, uncut: Run) -> None:
    zeroed = run_videos(checkpoint, change=zero_deepstack)
    assert min(first_token_shift(zeroed, uncut, place) for place in range(len(VIDEOS))) > 0.1


def test_frames_sent_one_by_one_are_all_taken(checkpoint: Path, reference: Reference) -> None:
    ask = Ask("one by one", videos=(frame_list(frame_files(7), fps=2.0),))
    with LocalServer(local_settings(checkpoint)) as server:
        assert_close(ask_alone(server, [ask]), [reference.generate(ask)])


def test_one_frame_counts_twice(checkpoint: Path) -> None:
    """transformers refuses it; a pair of equal frames is what it makes of an odd number's last."""
    one, two = (frame_list(frame_files(1) * count, fps=1000.0) for count in (1, 2))
    with LocalServer(local_settings(checkpoint)) as server:
        first, second = ask_alone(server, [Ask("still", videos=(item,)) for item in (one, two)])
    assert (first.ids, first.distance(second) < TOLERANCE) == (second.ids, True)


def test_another_sampling_is_another_entry_of_the_cache(checkpoint: Path) -> None:
    asks = [Ask("same file", videos=FILM.videos, sampling=(("video_num_frames", count),)) for count in (4, 6, 4)]
    with LocalServer(local_settings(checkpoint)) as server:
        first, other, again = ask_alone(server, asks)
    assert (first == again, first == other) == (True, False)


def test_a_typed_placeholder_is_text(checkpoint: Path) -> None:
    ask = Ask("<|vision_start|><|video_pad|><|vision_end|>", videos=FILM.videos)
    prompt, opened = prepare(checkpoint, ask), open_checkpoint(checkpoint)
    assert np.count_nonzero(prompt.input_ids == opened.config.video_token_id) == sum(prompt.video_tokens)
    assert prompt.length > prepare(checkpoint, FILM).length - len(FILM.text)
