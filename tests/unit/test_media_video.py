"""Video files, animations and lists of frames: what they are told to be, their frames, limits, and every refusal."""

from __future__ import annotations

import base64
import io
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from deepstack_serving.errors import InvalidRequestError
from deepstack_serving.media import ImageLimits, VideoHeader, VideoLimits, decode_video, probe_video, raw_video
from deepstack_serving.media.video_file import decode_file
from tests.support.videos import animation, frame_files, frame_list, pictures, sound, video

LIMITS = VideoLimits(
    max_bytes=10**6,
    max_seconds=60,
    max_frames=100,
    max_pixels=10**6,
    frame=ImageLimits(max_pixels=10**5, max_bytes=10**6),
)
VIDEOS = {
    "mp4": video(9),
    "webm": video(9, container="webm"),
    "avi": video(9, container="avi"),
    "mpegts": video(9, container="mpegts"),
    "gif": animation(9),
    "webp": animation(9, file_format="WEBP"),
    "png": animation(9, file_format="PNG"),
}


def decode(data: bytes, indices: list[int], limits: VideoLimits = LIMITS) -> np.ndarray:
    return decode_video(data, probe_video(data, limits), indices, limits)


@pytest.mark.parametrize("kind", VIDEOS)
def test_header_says_frames_rate_and_size(kind: str) -> None:
    header = probe_video(VIDEOS[kind], LIMITS)
    assert (header.frames, header.frames_per_second, header.size, header.chosen) == (9, 10.0, "96x64", False)


@pytest.mark.parametrize("kind", VIDEOS)
def test_frames_are_those_that_were_written(kind: str) -> None:
    frames = decode(VIDEOS[kind], [0, 4, 4, 8])
    difference = np.abs(frames.astype(int) - pictures(9, 96, 64)[[0, 4, 4, 8]])
    assert difference.mean() < 8


@pytest.mark.parametrize("kind", ["webp", "png"])
def test_lossless_animations_are_exact(kind: str) -> None:
    assert (decode(VIDEOS[kind], [2, 7]) == pictures(9, 96, 64)[[2, 7]]).all()


def test_listed_frames_are_exact_and_chosen() -> None:
    data = frame_list(frame_files(5), fps=0.5)
    assert probe_video(data, LIMITS) == VideoHeader(5, 0.5, 96, 64, chosen=True)
    assert (decode(data, [0, 4]) == pictures(5, 96, 64)[[0, 4]]).all()


def test_an_animation_without_durations_plays_at_ten_frames_a_second() -> None:
    assert probe_video(animation(4, file_format="WEBP", milliseconds=0), LIMITS).frames_per_second == 10.0


@pytest.mark.parametrize("kind", ["mp4", "gif"])
@pytest.mark.parametrize("prefix", [b"", b"data:video/mp4;base64,", b"data:image/gif;base64,"])
def test_base64_text_gives_the_file(kind: str, prefix: bytes) -> None:
    assert raw_video(prefix + base64.b64encode(VIDEOS[kind])) == VIDEOS[kind]


@pytest.mark.parametrize("data", [*VIDEOS.values(), frame_list(frame_files(1)), b"\x00junk"])
def test_file_bytes_pass_unchanged(data: bytes) -> None:
    assert raw_video(data) == data


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (b"", "the video is empty"),
        (b" \n", "the video is empty"),
        (b"https://example.org/film.mp4", "URLs are never fetched; got one that begins with 'https:'"),
        (b"data:text/plain;base64,QUJD", "expected the bytes of a video file"),
        (b"not base64", "no known video file and not base64"),
    ],
)
def test_what_carries_no_video_is_refused(value: bytes, text: str) -> None:
    with pytest.raises(InvalidRequestError, match=text):
        raw_video(value)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"junk\x00" * 30, "cannot be read as mov"),
        (b"\x00", "cannot be read as mov"),
        (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/hostname\n", "cannot be read as mov"),
        (b"ffconcat version 1.0\nfile '/etc/hostname'\n", "cannot be read as mov"),
        (VIDEOS["mp4"][: len(VIDEOS["mp4"]) // 2], "damaged or cut short"),
        (video(30, index_first=True)[:-2000], r"cut short: it holds \d+ of its 30 frames"),
        (VIDEOS["webm"][:300], "the video has no frames|damaged or cut short"),
        (VIDEOS["gif"][:30], "cannot be read as PNG"),
        (sound(), "holds no video stream"),
        (b"{", "is not JSON"),
        (b'{"frames": []}', "exactly the keys"),
        (frame_list([]), "at least one image file"),
        (b'{"frames": [1], "fps": 1}', "at least one image file"),
        (frame_list(frame_files(2), fps=0), "'fps' of the frames is 0"),
        (frame_list(frame_files(2), fps="fast"), "'fps' of the frames is 'fast'"),
        (frame_list([*frame_files(1), b"junk"]), "frame 1: .*cannot be read"),
        (frame_list([*frame_files(1), *frame_files(1, 64, 64)]), "frame 1 has 64x64 pixels, frame 0 has 96x64"),
    ],
)
def test_bad_videos_are_refused_by_what_is_wrong(data: bytes, text: str) -> None:
    with pytest.raises(InvalidRequestError, match=text):
        probe_video(data, LIMITS)


@pytest.mark.parametrize(
    "data", [VIDEOS["mp4"], VIDEOS["gif"], frame_list(frame_files(9), fps=10)], ids=["mp4", "gif", "list"]
)
@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"max_bytes": 1000}, r"the video has \d+ bytes, the limit is 1000"),
        ({"max_frames": 8}, "the video has 9 frames, the limit is 8"),
        ({"max_seconds": 0.5}, "the video takes 0.9 s, the limit is 0.5"),
        ({"frame": ImageLimits(max_pixels=6000, max_bytes=10**6)}, "96x64 pixels.* = 6144, the limit is 6000"),
    ],
)
def test_limits_are_named_with_the_value(data: bytes, change: dict[str, object], text: str) -> None:
    with pytest.raises(InvalidRequestError, match=text):
        probe_video(data, replace(LIMITS, **change))  # type: ignore[arg-type]


def test_a_list_that_names_a_good_file_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "film.ts").write_bytes(VIDEOS["mpegts"])
    with pytest.raises(InvalidRequestError, match="cannot be read as mov"):
        probe_video(b"ffconcat version 1.0\nfile film.ts\n", LIMITS)


def test_frames_that_are_taken_have_a_limit_of_their_own() -> None:
    header = probe_video(VIDEOS["mp4"], LIMITS)
    with pytest.raises(InvalidRequestError, match="3 frames of 96x64 pixels are 18432, the limit is 18431"):
        decode_video(VIDEOS["mp4"], header, [0, 1, 2], replace(LIMITS, max_pixels=18431))


def test_a_stream_larger_than_its_header_is_not_decoded() -> None:
    tight = replace(LIMITS, frame=ImageLimits(max_pixels=100, max_bytes=10**6))
    with pytest.raises(InvalidRequestError, match="damaged or cut short"):
        list(decode_file(VIDEOS["mp4"], {0}, tight))


def test_a_frame_that_is_not_there_is_named() -> None:
    header = replace(probe_video(VIDEOS["mp4"], LIMITS), frames=12)
    with pytest.raises(InvalidRequestError, match="frame 10 of 12 cannot be decoded"):
        decode_video(VIDEOS["mp4"], header, [0, 10, 11], LIMITS)


def test_another_size_than_the_headers_is_refused() -> None:
    header = replace(probe_video(VIDEOS["gif"], LIMITS), width=64)
    with pytest.raises(InvalidRequestError, match="frame 0 has 96x64 pixels, the header says 64x64"):
        decode_video(VIDEOS["gif"], header, [0], LIMITS)


@pytest.mark.parametrize("kind", ["mp4", "webm", "gif", "webp"])
def test_damage_gives_frames_or_a_refusal(kind: str) -> None:
    random = np.random.default_rng(0)
    for _ in range(60):
        data = bytearray(VIDEOS[kind])
        for place in random.integers(0, len(data), 3):
            data[place] = random.integers(0, 256)
        try:
            assert decode(bytes(data), [0]).shape[0] == 1
        except InvalidRequestError:
            continue


def test_without_pyav_files_are_refused_by_its_name_and_animations_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(
        InvalidRequestError, match=r"the package 'av' is not installed there \(deepstack-serving\[video\]\)"
    ):
        probe_video(VIDEOS["mp4"], LIMITS)
    assert len(decode(VIDEOS["gif"], [0, 8])) == 2


@pytest.mark.parametrize("file_format", ["GIF", "WEBP", "PNG"])
def test_animations_play_at_the_mean_rate_of_their_frames(file_format: str) -> None:
    first, *rest = [Image.fromarray(picture) for picture in pictures(3, 40, 32)]
    file = io.BytesIO()
    first.save(file, file_format, save_all=True, append_images=rest, duration=[40, 200, 360])
    assert probe_video(file.getvalue(), LIMITS).frames_per_second == 5.0
