"""Videos on the real server: every form of one, by every entry point, and refusals that leave the server as it was."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepstack_client import Client, RequestOptions, VideoFrames
from deepstack_serving.embedded import EmbeddedServer
from tests.support.asking import Ask, ask_alone, picture
from tests.support.local import LocalServer, local_settings
from tests.support.raw_client import ask, generate, infer, refusal, request
from tests.support.videos import animation, frame_files, frame_list, sound, video

FILM = video(9)
PICTURE = picture(64, 64, 5)
FRAMES = frame_list(frame_files(5), fps=2.0)
ASKS = {
    "file": Ask("what happens?", videos=(FILM,)),
    "animation": Ask("what happens?", videos=(animation(6),)),
    "frames": Ask("what happens?", videos=(FRAMES,)),
    "more frames": Ask("what happens?", videos=(FILM,), sampling=(("video_fps", 8.0),)),
    "mixed": Ask("and then?", (PICTURE,), (FILM, FRAMES), ("video", "image", "video"), (("video_num_frames", 6),)),
}


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> dict[str, tuple[int, ...]]:
    """What the same stages and engine answer without a server."""
    with LocalServer(local_settings(checkpoint)) as local:
        return {name: answer.ids for name, answer in zip(ASKS, ask_alone(local, list(ASKS.values())), strict=True)}


def inputs_of(asked: Ask) -> dict[str, Any]:
    """As tensors: media as lists of bytes, text and numbers as scalars."""
    values = {name: value if name in ("image", "video") else value[0] for name, value in asked.inputs.items()}
    return {**values, **request(logprobs=1, return_logprobs=True)}


def as_json(inputs: dict[str, Any]) -> dict[str, Any]:
    media = ("image", "video")
    encoded = {name: [base64.b64encode(item).decode() for item in inputs[name]] for name in media if name in inputs}
    return {**inputs, **encoded}


@pytest.mark.parametrize("name", ASKS)
def test_videos_are_answered_by_grpc_and_http(
    server: EmbeddedServer, expected: dict[str, tuple[int, ...]], name: str
) -> None:
    inputs = inputs_of(ASKS[name])
    assert tuple(ask(server, inputs).token_ids) == expected[name]
    tokens = json.loads(generate(server, as_json(inputs))["logprobs"])
    assert tuple(token["token_id"] for token in tokens) == expected[name]


@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_the_client_library_sends_videos(server: EmbeddedServer, scheme: str) -> None:
    address = server.grpc_address if scheme == "grpc" else server.http_address
    source = VideoFrames(frame_files(5), fps=2.0)
    options: RequestOptions = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
    with Client(f"{scheme}://{address}") as client:
        texts = [client.generate("what happens?", videos=[item], **options).text for item in (source, FILM)]
    wanted = [ask(server, request("what happens?", video=[item])).text for item in (FRAMES, FILM)]
    assert texts == wanted


def test_the_encoder_alone_takes_videos(server: EmbeddedServer) -> None:
    tensors = {"video": np.array([FILM], dtype=np.object_), "video_sampling": np.array([0, 6], dtype=np.float32)}
    sizes = infer(server, "vision_encoder", tensors, ["video_grid_thw", "video_tokens", "image_tokens", "ds_0"])
    assert (sizes["video_grid_thw"].tolist(), sizes["video_tokens"].tolist()) == ([[3, 4, 6]], [18])
    assert (sizes["image_tokens"].tolist(), sizes["ds_0"].shape) == ([], (18, 64))


BAD = {
    "junk": (b"\x00\x01\x02 this is no film", "cannot be read"),
    "empty": (b"", "empty"),
    "cut": (FILM[: len(FILM) // 2], "damaged or cut short"),
    "too many bytes": (FILM + bytes(1 << 20), "the limit is 1048576"),
    "too long": (frame_list(frame_files(2), fps=0.05), "the video takes 40.0 s, the limit is 20"),
    "too many pixels": (video(9, 320, 240), "4 frames of 320x240 pixels are 307200, the limit is 200000"),
    "sound alone": (sound(), "holds no video stream"),
    "no frames": (frame_list([]), "at least one image file"),
    "address": (b"http://169.254.169.254/latest/meta-data", "never fetched"),
    "playlist": (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/hostname\n", "cannot be read"),
}


@pytest.mark.parametrize(("data", "reason"), BAD.values(), ids=BAD)
def test_bad_video_is_refused_with_its_number(server: EmbeddedServer, data: bytes, reason: str) -> None:
    text = refusal(server, request("what happens?", video=[FILM, data]))
    assert text.startswith("[INVALID_ARG] video[1]: ")
    assert reason in text


REQUESTS: dict[str, tuple[dict[str, Any], str]] = {
    "three videos": (request("x", video=[FILM] * 3), "the limit is 2 ('max_videos_per_request')"),
    "rate and number": (request("x", video=[FILM], video_fps=1.0, video_num_frames=4), "exclude each other"),
    "no rate": (request("x", video=[FILM], video_fps=0.0), "'video_fps' is 0.0"),
    "no frames": (request("x", video=[FILM], video_num_frames=0), "'video_num_frames' is 0"),
    "frames beyond the limit": (request("x", video=[FILM], video_num_frames=500_000), "500000 frames are asked for"),
    "a typed placeholder only": (request("<|video_pad|>", raw_prompt=True), "1 video tokens, its videos take 0"),
    "raw without a placeholder": (request("x", video=[FILM], raw_prompt=True), "0 video placeholders for 1 videos"),
}


@pytest.mark.parametrize(("inputs", "reason"), REQUESTS.values(), ids=REQUESTS)
def test_bad_request_about_videos_is_refused(server: EmbeddedServer, inputs: dict[str, Any], reason: str) -> None:
    text = refusal(server, inputs)
    assert text.startswith("[INVALID_ARG]")
    assert reason in text
