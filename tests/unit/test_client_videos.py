"""Videos in the client's requests: files, frames one by one, and which frames the server is to take."""

import base64
import json
from pathlib import Path

import pytest

from deepstack_client import InvalidRequestError, RequestOptions, VideoFrames
from deepstack_client.cli import main
from deepstack_client.request import RequestFactory, WireRequest
from deepstack_client.testing import FakeTransport, answer
from deepstack_client.transports import grpc_codec, http_codec


def build(prompt="What happens?", **options) -> WireRequest:
    return RequestFactory("orchestrator", 30.0).build(prompt, (), True, RequestOptions(**options))[0]


def test_videos_keep_their_order_whether_path_or_bytes(tmp_path: Path):
    path = tmp_path / "one.mp4"
    path.write_bytes(b"first")
    assert build(videos=[path, b"second"]).inputs["video"] == (b"first", b"second")


def test_frames_become_one_json_text(tmp_path: Path):
    path = tmp_path / "one.png"
    path.write_bytes(b"first")
    [video] = build(videos=[VideoFrames([path, b"second"], fps=2)]).inputs["video"]
    frames = [base64.b64encode(content).decode() for content in (b"first", b"second")]
    assert json.loads(video) == {"frames": frames, "fps": 2}


def test_files_inside_a_message_become_base64():
    parts = [{"type": "video", "video": b"film"}, {"type": "video", "video": [b"frame"], "fps": 2}]
    content = json.loads(build([{"role": "user", "content": parts}]).inputs["messages"])[0]["content"]
    assert [base64.b64decode(content[0]["video"]), base64.b64decode(content[1]["video"][0])] == [b"film", b"frame"]


def test_sampling_is_sent_only_when_given():
    assert build(video_fps=2, video_num_frames=None).inputs.items() >= {("video_fps", 2.0)}
    assert not {"video", "video_fps", "video_num_frames"} & build(video_fps=None).inputs.keys()


def test_numbers_go_as_the_types_that_the_model_declares():
    message = grpc_codec.encode_request(build(video_fps=2.5, video_num_frames=3))
    types = {item.name: item.datatype for item in message.inputs}
    assert (types["video_fps"], types["video_num_frames"]) == ("FP32", "INT32")
    body = json.loads(http_codec.encode_request(build(video_fps=2.5, video_num_frames=3))[1])
    assert (body["video_fps"], body["video_num_frames"]) == (2.5, 3)


@pytest.mark.parametrize("videos", ["film.mp4", b"film", VideoFrames([b"1"], fps=2), [b""], [5], ["missing.mp4"]])
def test_what_is_no_list_of_videos_is_refused(videos):
    with pytest.raises(
        InvalidRequestError, match=r"videos must be a list|video is empty|video must be|cannot read video"
    ):
        build(videos=videos)


def test_chat_sends_videos_and_sampling(tmp_path: Path):
    path = tmp_path / "film.mp4"
    path.write_bytes(b"film")
    fake = FakeTransport(answer("x"))
    words = ["chat", "--video", str(path), "--video", str(path), "--video-fps", "2", "-p", "What happens?"]
    assert main(words, transport_factory=lambda _: fake, commands=[]) == 0
    inputs = fake.calls[0].request.inputs
    assert (inputs["video"], inputs["video_fps"]) == ((b"film", b"film"), 2.0)


@pytest.mark.parametrize("count", [0, -1, 2**31, 2**32 + 2])
def test_number_of_frames_beyond_its_type_is_refused(count: int):
    with pytest.raises(InvalidRequestError, match=f"video_num_frames is {count}"):
        build(video_num_frames=count)
