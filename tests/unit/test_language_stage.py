"""A language stage refuses a wrong call before it writes to its pool, and answers what a call asks for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from deepstack_serving.errors import WireError
from deepstack_serving.media import MediaFiles
from deepstack_serving.stages.info import StageInfo
from deepstack_serving.stages.language import LanguageStage
from tests.support.asking import picture
from tests.support.local import STAGE_NAMES, LocalPort, local_settings

Tensors = dict[str, torch.Tensor]
OUTPUTS = ("next_ids", "logprobs")
FEATURES = ("image_embeds", "ds_0", "ds_1", "ds_2")
IMAGE_TOKENS = 4


@pytest.fixture(scope="module")
def port(checkpoint: Path) -> LocalPort:
    return LocalPort(local_settings(checkpoint, kv_pool_tokens=64, block_size=16), STAGE_NAMES[1])


@pytest.fixture
def stage(port: LocalPort) -> Iterator[LanguageStage]:
    """The whole model in one stage; no test here may write to its pool."""
    (stage,) = port.language.values()
    pool = stage._pool
    pool.keys.zero_()
    pool.values.zero_()
    yield stage
    assert not pool.keys.any()
    assert not pool.values.any()


def good_call(port: LocalPort, image_token_id: int) -> Tensors:
    """A prompt of four image tokens between two of text, in two blocks."""
    encoded = port.call_encoder(MediaFiles((picture(64, 64),)), FEATURES)
    return {
        "input_ids": torch.tensor([5, *[image_token_id] * IMAGE_TOKENS, 6]),
        "position_ids": torch.arange(6).expand(3, 6),
        "query_lengths": torch.tensor([6], dtype=torch.int32),
        "context_lengths": torch.tensor([6], dtype=torch.int32),
        "block_tables": torch.tensor([[2, 1]], dtype=torch.int32),
        "image_rows": torch.arange(1, 5),
        "feature_rows": torch.arange(IMAGE_TOKENS),
        "sample_rows": torch.tensor([5]),
        **{name: encoded[name] for name in FEATURES},
    }


@pytest.fixture
def call(port: LocalPort, checkpoint: Path) -> Tensors:
    from deepstack_serving.checkpoint import open_checkpoint

    return good_call(port, open_checkpoint(checkpoint).config.image_token_id)


REFUSED: dict[str, tuple[Tensors, str]] = {
    "token beyond the vocabulary": ({"input_ids": torch.tensor([10**6, *[0] * 5])}, "'input_ids'"),
    "negative token": ({"input_ids": torch.tensor([-1, *[0] * 5])}, "'input_ids'"),
    "lost placeholder": ({"input_ids": torch.zeros(6, dtype=torch.int64)}, "'image_rows' maps 4 rows"),
    "block beyond the pool": ({"block_tables": torch.tensor([[4, 0]], dtype=torch.int32)}, "'block_tables' row 0"),
    "feature row beyond the image": ({"feature_rows": torch.tensor([0, 1, 2, 4])}, "'feature_rows'"),
    "feature of another type": ({"ds_1": torch.zeros(4, 64).bfloat16()}, "'ds_1' has type BF16; expected FP32"),
    "feature of another width": ({"ds_1": torch.zeros(4, 63)}, "'ds_1' has shape [4, 63]"),
    "forced token beyond the vocabulary": ({"forced_ids": torch.tensor([10**6])}, "'forced_ids'"),
    "negative forced token": ({"forced_ids": torch.tensor([-1])}, "'forced_ids'"),
    "too many alternatives": ({"top_count": torch.tensor([65], dtype=torch.int32)}, "'top_count'"),
    "no alternatives": ({"top_count": torch.tensor([0], dtype=torch.int32)}, "'top_count'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_call_is_refused_before_any_write(stage: LanguageStage, call: Tensors, case: str) -> None:
    change, text = REFUSED[case]
    with pytest.raises(WireError, match=re.escape(text)):
        stage.run({**call, **change}, (*OUTPUTS, "top_ids"))


def test_stateless_call_writes_nothing(stage: LanguageStage, call: Tensors) -> None:
    del call["block_tables"]
    assert set(stage.run(call, OUTPUTS)) == set(OUTPUTS)


def test_call_for_the_stage_info_runs_nothing(stage: LanguageStage) -> None:
    answered = stage.run({}, ["stage_info"])["stage_info"]
    assert StageInfo.from_bytes(bytes(answered.tolist())) == stage.info


def test_no_rows_to_sample_give_no_tokens(stage: LanguageStage, call: Tensors) -> None:
    del call["block_tables"]
    result = stage.run({**call, "sample_rows": torch.zeros(0, dtype=torch.int64)}, OUTPUTS)
    assert result["next_ids"].shape == result["logprobs"].shape == (0,)
