"""What a stage hands over stays what it was, whatever happens to the memory it came from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deepstack_serving.checkpoint import open_checkpoint
from deepstack_serving.media import MediaFiles
from tests.support.asking import ONE_IMAGE, picture
from tests.support.local import STAGE_NAMES, LocalPort, local_settings
from tests.support.reference import Reference
from tests.support.stateless import Rows, feature_names, packed_inputs

HANDED_OVER = ("hidden_states", "ds_1", "ds_2")


def port_of(checkpoint: Path, points: str) -> LocalPort:
    return LocalPort(local_settings(checkpoint, split_points=points), STAGE_NAMES[4])


def call_inputs(port: LocalPort, checkpoint: Path, reference: Reference) -> dict[str, torch.Tensor]:
    prompt = reference.prompt(ONE_IMAGE)
    names = feature_names(port)
    encoded = port.call_encoder(MediaFiles(ONE_IMAGE.images), names)
    rows = Rows(prompt.input_ids, prompt.positions, {name: encoded[name] for name in names})
    inputs = packed_inputs([rows], open_checkpoint(checkpoint).config.image_token_id)
    return {name: tensor.clone() for name, tensor in inputs.items()}


@torch.inference_mode()
def spoil(tensors: dict[str, torch.Tensor]) -> None:
    for tensor in tensors.values():
        tensor.fill_(0)


@pytest.mark.parametrize("name", HANDED_OVER)
def test_first_stage_hands_over_copies(checkpoint: Path, reference: Reference, name: str) -> None:
    port = port_of(checkpoint, "1,2,3")
    inputs = call_inputs(port, checkpoint, reference)
    sent = port.language["language_0"].run(inputs, HANDED_OVER)[name]
    before = sent.clone()
    spoil(inputs)
    assert torch.equal(sent, before)


@pytest.mark.parametrize("points", ["1,2,3", "0,0,3"], ids=["own layers", "no layers"])
@pytest.mark.parametrize("name", ["hidden_states", "ds_2"])
def test_middle_stage_hands_over_copies(checkpoint: Path, reference: Reference, points: str, name: str) -> None:
    port = port_of(checkpoint, points)
    inputs = call_inputs(port, checkpoint, reference)
    first = port.language["language_0"].run(inputs, ("hidden_states", *feature_names(port)))
    known = {spec.name for spec in port.language["language_1"].interface.inputs}
    received = {key: value.clone() for key, value in (inputs | first).items() if key in known}
    sent = port.language["language_1"].run(received, ("hidden_states", "ds_2"))[name]
    before = sent.clone()
    spoil(received)
    assert torch.equal(sent, before)


@pytest.mark.parametrize("name", HANDED_OVER)
def test_next_call_leaves_the_last_ones_outputs_alone(checkpoint: Path, reference: Reference, name: str) -> None:
    port = port_of(checkpoint, "1,2,3")
    inputs = call_inputs(port, checkpoint, reference)
    sent = port.language["language_0"].run(inputs, HANDED_OVER)[name]
    before = sent.clone()
    port.language["language_0"].run({**inputs, "ds_0": -inputs["ds_0"], "ds_1": -inputs["ds_1"]}, HANDED_OVER)
    assert torch.equal(sent, before)


def test_spoilt_features_do_not_reach_the_encoders_cache(checkpoint: Path) -> None:
    port = port_of(checkpoint, "balanced")
    names = feature_names(port)
    sent = port.call_encoder(MediaFiles(ONE_IMAGE.images), names)
    before = {name: sent[name].clone() for name in names}
    spoil(sent)
    again = port.call_encoder(MediaFiles(ONE_IMAGE.images), names)
    assert [name for name in names if not torch.equal(again[name], before[name])] == []


def test_another_image_leaves_handed_out_features_alone(checkpoint: Path) -> None:
    port = port_of(checkpoint, "balanced")
    names = feature_names(port)
    sent = port.call_encoder(MediaFiles(ONE_IMAGE.images), names)
    before = {name: sent[name].clone() for name in names}
    port.call_encoder(MediaFiles((picture(100, 70, 30),)), names)
    assert [name for name in names if not torch.equal(sent[name], before[name])] == []
