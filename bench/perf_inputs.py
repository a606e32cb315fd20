"""Writes what the load generators send: perf_analyzer's JSON of image requests, AIPerf's request template."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from bench.pictures import pictures, questions

MAX_TOKENS = 32
SAMPLING = json.dumps({"max_tokens": MAX_TOKENS, "ignore_eos": True})

# AIPerf gives images as data URIs; the server takes the base64 text behind the comma.
_TEMPLATE = """{"text_input": {{ text|tojson }}, "stream": {{ stream|tojson }}, "exclude_input_in_output": true
{%- if images %}, "image": [{% for image in images %}{{ (image.split(",")[-1])|tojson }}
{%- if not loop.last %}, {% endif %}{% endfor %}]{% endif %},
 "sampling_parameters": {{ ('{"max_tokens": ' ~ (max_tokens or 32) ~ ', "ignore_eos": true}')|tojson }}}
"""


def orchestrator_requests(count: int, first_seed: int) -> dict[str, Any]:
    """Streamed requests, each with a picture of its own: the encoder's cache never answers for it."""
    pairs = zip(questions(count), _base64_pictures(count, first_seed), strict=True)
    return {
        "data": [
            {
                "text_input": [question],
                "image": _one_image(picture),
                "stream": [True],
                "exclude_input_in_output": [True],
                "sampling_parameters": [SAMPLING],
            }
            for question, picture in pairs
        ]
    }


def encoder_requests(count: int, first_seed: int) -> dict[str, Any]:
    """One picture per request to vision_encoder alone."""
    return {"data": [{"image": _one_image(picture)} for picture in _base64_pictures(count, first_seed)]}


def write_requests(path: Path, requests: dict[str, Any]) -> Path:
    """Writes the file and returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(requests))
    return path


def write_template(path: Path) -> Path:
    """AIPerf's payload template for generate_stream."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_TEMPLATE)
    return path


def _base64_pictures(count: int, first_seed: int) -> list[str]:
    return [base64.b64encode(picture).decode() for picture in pictures(count, first_seed)]


def _one_image(text: str) -> dict[str, Any]:
    """The shape is needed: the input's size is free."""
    return {"content": [text], "shape": [1]}
