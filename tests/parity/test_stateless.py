"""Calls without block tables, chained by hand: they score a prompt as transformers' forward pass does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deepstack_serving.checkpoint import open_checkpoint
from deepstack_serving.media import MediaFiles
from tests.support.asking import MIXED, ONE_IMAGE, TEXT, Ask
from tests.support.local import STAGE_NAMES, LocalPort, local_settings
from tests.support.reference import Reference
from tests.support.stateless import Rows, feature_names, packed_inputs, run_chain

TOLERANCE = 1e-4
TOP = 64


def rows_of(port: LocalPort, reference: Reference, ask: Ask) -> Rows:
    prompt = reference.prompt(ask)
    names = feature_names(port) if ask.images else []
    features = port.call_encoder(MediaFiles(ask.images), names) if names else {}
    return Rows(prompt.input_ids, prompt.positions, {name: features[name] for name in names})


def score(port: LocalPort, inputs: dict[str, torch.Tensor], image_token_id: int) -> dict[str, torch.Tensor]:
    """Log-probabilities of every next token of the packed ids, and the best alternatives."""
    ids = inputs["input_ids"]
    sampling = {"sample_rows": torch.arange(len(ids)), "forced_ids": ids.roll(-1), "top_count": torch.tensor([TOP])}
    sampling["top_count"] = sampling["top_count"].int()
    return run_chain(port, inputs, sampling)


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("asks", [(TEXT,), (ONE_IMAGE,), MIXED], ids=["text", "image", "packed"])
def test_prompt_scores_equal_the_forward_pass(
    checkpoint: Path, reference: Reference, stages: int, asks: tuple[Ask, ...]
) -> None:
    port = LocalPort(local_settings(checkpoint), STAGE_NAMES[stages])
    image_token_id = open_checkpoint(checkpoint).config.image_token_id
    inputs = packed_inputs([rows_of(port, reference, ask) for ask in asks], image_token_id)
    result = score(port, inputs, image_token_id)
    expected = torch.cat([reference.logprobs(ask) for ask in asks])
    torch.testing.assert_close(
        result["logprobs"], expected.gather(1, inputs["input_ids"].roll(-1)[:, None])[:, 0], atol=TOLERANCE, rtol=0
    )
    torch.testing.assert_close(result["top_logprobs"], expected.topk(TOP).values, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(expected.gather(1, result["top_ids"]), expected.topk(TOP).values, atol=TOLERANCE, rtol=0)


def test_stateless_call_leaves_the_pool_alone(checkpoint: Path, reference: Reference) -> None:
    port = LocalPort(local_settings(checkpoint), STAGE_NAMES[1])
    image_token_id = open_checkpoint(checkpoint).config.image_token_id
    inputs = packed_inputs([rows_of(port, reference, ONE_IMAGE)], image_token_id)
    with_pool = inputs | {"block_tables": torch.tensor([[3, 1, 7, 0, 5, 2]], dtype=torch.int32)}
    first = score(port, with_pool, image_token_id)
    score(port, inputs, image_token_id)
    again = score(port, with_pool, image_token_id)
    assert torch.equal(first["logprobs"], again["logprobs"])
