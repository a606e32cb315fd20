"""The files that the load generators send."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

from jinja2 import Environment
from PIL import Image

from bench.perf_inputs import MAX_TOKENS, encoder_requests, orchestrator_requests, write_requests, write_template
from bench.pictures import pictures
from deepstack_serving.audit.pictures import picture_jpeg


def test_a_picture_is_a_file_of_the_wanted_size() -> None:
    assert Image.open(io.BytesIO(picture_jpeg(1, (320, 240)))).size == (320, 240)


def test_the_same_seed_gives_the_same_picture() -> None:
    assert picture_jpeg(7, (64, 64)) == picture_jpeg(7, (64, 64))


def test_no_two_pictures_are_the_same() -> None:
    assert len(set(pictures(12, first_seed=0))) == 12


def test_each_request_carries_one_decodable_picture() -> None:
    (request,) = orchestrator_requests(1, first_seed=0)["data"]

    assert request["image"]["shape"] == [1]
    Image.open(io.BytesIO(base64.b64decode(request["image"]["content"][0]))).verify()


def test_each_request_generates_a_fixed_number_of_tokens() -> None:
    (request,) = orchestrator_requests(1, first_seed=0)["data"]

    assert json.loads(request["sampling_parameters"][0]) == {"max_tokens": MAX_TOKENS, "ignore_eos": True}


def test_questions_differ_between_neighbours() -> None:
    first, second = orchestrator_requests(2, first_seed=0)["data"]

    assert first["text_input"] != second["text_input"]


def test_the_encoder_gets_the_picture_alone() -> None:
    assert [list(request) for request in encoder_requests(2, first_seed=0)["data"]] == [["image"], ["image"]]


def test_requests_are_written_as_json(tmp_path: Path) -> None:
    path = write_requests(tmp_path / "deeper" / "input.json", {"data": []})

    assert json.loads(path.read_text()) == {"data": []}


def _render(tmp_path: Path, **values: object) -> dict[str, object]:
    template = Environment().from_string(write_template(tmp_path / "template.jinja").read_text())
    rendered: dict[str, object] = json.loads(template.render(text='a "b"', stream=True, **values))
    return rendered


def test_the_template_takes_the_base64_text_out_of_data_uris(tmp_path: Path) -> None:
    rendered = _render(tmp_path, images=["data:image/png;base64,QUJD", "data:image/png;base64,REVG"], max_tokens=5)

    assert rendered["image"] == ["QUJD", "REVG"]


def test_the_template_leaves_the_image_out_of_text_requests(tmp_path: Path) -> None:
    assert "image" not in _render(tmp_path, images=[], max_tokens=5)


def test_the_template_writes_sampling_parameters_as_a_string(tmp_path: Path) -> None:
    rendered = _render(tmp_path, images=[], max_tokens=5)

    assert json.loads(str(rendered["sampling_parameters"])) == {"max_tokens": 5, "ignore_eos": True}
