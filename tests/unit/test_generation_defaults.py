"""What the checkpoint's generation_config.json says holds until a request says otherwise."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from deepstack_serving.checkpoint import open_checkpoint
from deepstack_serving.engine.orchestrator import GenerationDefaults
from deepstack_serving.engine.sampling_parameters import SamplingParameters
from deepstack_serving.errors import CheckpointError


def defaults(checkpoint: Path, folder: Path, text: str | None) -> GenerationDefaults:
    copy = Path(shutil.copytree(checkpoint, folder / "copy"))
    (copy / "generation_config.json").unlink()
    if text is not None:
        (copy / "generation_config.json").write_text(text)
    return GenerationDefaults(open_checkpoint(copy))


@pytest.mark.parametrize(("text", "ids"), [('{"eos_token_id": 5}', (5,)), ('{"eos_token_id": [5, 6]}', (5, 6))])
def test_ends_of_sequence_are_read(checkpoint: Path, tmp_path: Path, text: str, ids: tuple[int, ...]) -> None:
    assert defaults(checkpoint, tmp_path, text).eos_token_ids == ids


@pytest.mark.parametrize("text", [None, "{}"])
def test_end_of_sequence_of_the_config_serves_without_one(checkpoint: Path, tmp_path: Path, text: str | None) -> None:
    expected = open_checkpoint(checkpoint).config.text_config.eos_token_id
    assert defaults(checkpoint, tmp_path, text).eos_token_ids == (expected,)


def test_sampling_is_taken_when_the_checkpoint_samples(checkpoint: Path, tmp_path: Path) -> None:
    text = '{"do_sample": true, "temperature": 0.7, "top_k": 20, "top_p": 0.8}'
    assert defaults(checkpoint, tmp_path, text).sampling == SamplingParameters(temperature=0.7, top_k=20, top_p=0.8)


def test_checkpoint_that_does_not_sample_is_greedy(checkpoint: Path, tmp_path: Path) -> None:
    assert defaults(checkpoint, tmp_path, '{"temperature": 0.7}').sampling.is_greedy


def test_file_that_is_not_json_is_refused_by_name(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        defaults(checkpoint, tmp_path, "{")
