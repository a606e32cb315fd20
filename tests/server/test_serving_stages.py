"""The three stages are plain models: chained by hand they give the orchestrator's token, and they refuse bad calls."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tritonclient.utils import InferenceServerException

from deepstack_serving.embedded import EmbeddedServer
from tests.support.asking import picture
from tests.support.raw_client import ask, infer, request
from tests.support.server import STAGES

Tensors = dict[str, npt.NDArray[Any]]
PICTURE = picture(64, 64, 5)
FEATURES = ("image_embeds", "ds_0", "ds_1", "ds_2")
PAD_ID_TEXT = "<|vision_start|><|image_pad|><|vision_end|>hello"


@pytest.fixture(scope="session")
def token_ids(checkpoint: Any) -> npt.NDArray[np.int64]:
    """Of a raw prompt with one image of four tokens."""
    from transformers import AutoTokenizer  # slow to import

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    ids = np.array(tokenizer(PAD_ID_TEXT)["input_ids"])
    return np.repeat(ids, np.where(ids == tokenizer.convert_tokens_to_ids("<|image_pad|>"), 4, 1))


def encode(server: EmbeddedServer, *files: bytes) -> Tensors:
    return infer(server, "vision_encoder", {"image": np.array(files, dtype=np.object_)}, [*FEATURES, "image_grid_thw"])


@pytest.fixture
def early_call(server: EmbeddedServer, token_ids: npt.NDArray[np.int64]) -> Tensors:
    """A stateless call of the first stage: text, an image of 2 x 2 tokens, text."""
    rows = np.arange(1, 5)
    positions = np.stack([np.arange(len(token_ids))] * 3)
    positions[:, rows] = np.array([[1, 1, 1, 1], [1, 1, 2, 2], [1, 2, 1, 2]])
    positions[:, 5:] = np.arange(3, 3 + len(token_ids) - 5)
    features = {name: tensor for name, tensor in encode(server, PICTURE).items() if name in FEATURES}
    length = np.array([len(token_ids)], dtype=np.int32)
    return {
        "input_ids": token_ids,
        "position_ids": positions,
        "query_lengths": length,
        "context_lengths": length,
        "image_rows": rows,
        "feature_rows": np.arange(4),
        **features,
    }


@pytest.fixture
def late_call(server: EmbeddedServer, early_call: Tensors) -> Tensors:
    """The call of the last stage that follows."""
    kept = ("position_ids", "query_lengths", "context_lengths")
    rows = {"sample_rows": np.array([early_call["position_ids"].shape[1] - 1])}
    return {
        **infer(server, "language_early", early_call, ["hidden_states"]),
        **rows,
        **{k: early_call[k] for k in kept},
    }


def test_stages_called_by_hand_give_the_orchestrators_token(server: EmbeddedServer, late_call: Tensors) -> None:
    results = infer(server, "language_late", late_call, ["next_ids", "logprobs"])
    expected = ask(server, request(PAD_ID_TEXT, [PICTURE], raw_prompt=True, logprobs=1, max_tokens=1))
    assert results["next_ids"].tolist() == expected.token_ids
    np.testing.assert_allclose(results["logprobs"], expected.logprobs, atol=1e-4)


def test_image_has_as_many_features_as_tokens(server: EmbeddedServer) -> None:
    results = encode(server, PICTURE, picture(100, 70, 1))
    tokens = results["image_grid_thw"].prod(1) // 4
    assert tokens[0] == 4
    assert {len(results[name]) for name in FEATURES} == {tokens.sum()}


def test_no_image_gives_features_without_rows(server: EmbeddedServer) -> None:
    results = infer(server, "vision_encoder", {"image": np.array([], dtype=np.object_)}, [*FEATURES, "image_grid_thw"])
    widths = {name: encode(server, PICTURE)[name].shape[1] for name in FEATURES}
    assert {name: results[name].shape for name in FEATURES} == {name: (0, width) for name, width in widths.items()}
    assert results["image_grid_thw"].shape == (0, 3)


def test_coming_images_are_no_part_of_a_call(server: EmbeddedServer) -> None:
    alone, other = encode(server, PICTURE), picture(96, 64, 6)
    files = {"image": [PICTURE], "coming_images": [other, b"junk"]}
    call = {name: np.array(values, dtype=np.object_) for name, values in files.items()}
    for name, tensor in infer(server, "vision_encoder", call, list(alone)).items():
        np.testing.assert_array_equal(tensor, alone[name])
    assert [len(encode(server, other)[name]) for name in FEATURES] == [6] * len(FEATURES)


def test_empty_element_is_named_by_its_number(server: EmbeddedServer) -> None:
    with pytest.raises(InferenceServerException, match=re.escape("[INVALID_ARG] image[1]: the image is empty")):
        encode(server, PICTURE, b"")


@pytest.mark.parametrize("index", [0, 1, 2])
def test_stage_tells_what_it_is(server: EmbeddedServer, early_call: Tensors, late_call: Tensors, index: int) -> None:
    calls: list[Tensors] = [{"image": np.array([], dtype=np.object_)}, early_call, late_call]
    info = json.loads(infer(server, STAGES[index], calls[index], ["stage_info"])["stage_info"].tobytes())
    assert info["model"] == STAGES[index]
    assert (info["first_layer"], info["end_layer"]) == [(0, 0), (0, 3), (3, 6)][index]


def check_refused(server: EmbeddedServer, model: str, call: Tensors, name: str) -> None:
    """The error names the tensor, and is the caller's."""
    outputs = ["hidden_states"] if model == "language_early" else ["next_ids", "top_ids"]
    with pytest.raises(InferenceServerException) as caught:
        infer(server, model, call, outputs)
    assert name in caught.value.message()
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"


def without(call: Tensors, *names: str) -> Tensors:
    return {name: tensor for name, tensor in call.items() if name not in names}


@pytest.mark.parametrize("name", ["input_ids", "position_ids", "query_lengths", "ds_0", "image_embeds"])
def test_missing_tensor_is_named(server: EmbeddedServer, early_call: Tensors, name: str) -> None:
    check_refused(server, "language_early", without(early_call, name), name)


def test_image_rows_without_features_are_refused(server: EmbeddedServer, early_call: Tensors) -> None:
    check_refused(server, "language_early", without(early_call, *FEATURES), "image_embeds")


def test_features_without_image_rows_are_refused(server: EmbeddedServer, early_call: Tensors) -> None:
    check_refused(server, "language_early", without(early_call, "image_rows", "feature_rows"), "image_embeds")


def test_image_tokens_without_any_mapping_are_refused(server: EmbeddedServer, early_call: Tensors) -> None:
    call = without(early_call, "image_rows", "feature_rows", *FEATURES)
    check_refused(server, "language_early", call, "image_rows")


@pytest.mark.parametrize("name", ["ds_5", "block_count"])
def test_unexpected_tensor_is_named(server: EmbeddedServer, early_call: Tensors, name: str) -> None:
    check_refused(server, "language_early", {**early_call, name: early_call["ds_0"]}, name)


def test_stage_takes_no_features_of_layers_that_are_not_its_own(server: EmbeddedServer, late_call: Tensors) -> None:
    check_refused(server, "language_late", {**late_call, "ds_0": np.zeros((4, 64), np.float32)}, "ds_0")


WRONG: dict[str, tuple[str, npt.NDArray[Any] | None]] = {
    "features of another type": ("ds_1", np.zeros((4, 64))),
    "ids of another type": ("input_ids", np.zeros(4, np.int32)),
    "features of another width": ("ds_1", np.zeros((4, 32), np.float32)),
    "features of another rank": ("ds_1", np.zeros((1, 4, 64), np.float32)),
    "fewer feature rows than the other levels": ("ds_1", np.zeros((3, 64), np.float32)),
    "no feature rows": ("ds_1", np.zeros((0, 64), np.float32)),
    "two axes": ("position_ids", np.zeros((2, 30), np.int64)),
    "fewer ids than positions": ("input_ids", np.zeros(3, np.int64)),
    "query lengths of other rows": ("query_lengths", np.array([2], np.int32)),
    "negative query length": ("query_lengths", np.array([-1], np.int32)),
    "context shorter than the query": ("context_lengths", np.array([1], np.int32)),
    "more contexts than queries": ("context_lengths", np.array([30, 30], np.int32)),
    "image row beyond the call": ("image_rows", np.array([1, 2, 3, 400])),
    "negative image row": ("image_rows", np.array([-1, 2, 3, 4])),
    "image row twice": ("image_rows", np.array([1, 1, 3, 4])),
    "image row that is text": ("image_rows", np.array([1, 2, 3, 6])),
    "feature row beyond the features": ("feature_rows", np.array([0, 1, 2, 4])),
    "negative feature row": ("feature_rows", np.array([-1, 1, 2, 3])),
    "block beyond the pool": ("block_tables", np.array([[9999]], np.int32)),
    "negative block": ("block_tables", np.array([[-1]], np.int32)),
    "tables of two sequences": ("block_tables", np.zeros((2, 2), np.int32)),
    "token beyond the vocabulary": ("input_ids", None),
    "negative token": ("input_ids", None),
}


@pytest.mark.parametrize("case", WRONG)
def test_ill_fitting_tensor_is_named(server: EmbeddedServer, early_call: Tensors, case: str) -> None:
    name, tensor = WRONG[case]
    if tensor is None:
        tensor = np.append(early_call["input_ids"][:-1], -1 if case == "negative token" else 1_000_000)
    check_refused(server, "language_early", {**early_call, name: tensor}, name)


LATE = {
    "row beyond the call": ("sample_rows", np.array([1000])),
    "negative row": ("sample_rows", np.array([-1])),
    "hidden states of another width": ("hidden_states", np.zeros((3, 5), np.float32)),
    "temperature alone": ("temperature", np.array([1.0], np.float32)),
    "forced ids of other rows": ("forced_ids", np.array([1, 2])),
    "forced id beyond the vocabulary": ("forced_ids", np.array([1_000_000])),
    "negative forced id": ("forced_ids", np.array([-1])),
    "negative count of alternatives": ("top_count", np.array([-1], np.int32)),
}


@pytest.mark.parametrize(("name", "tensor"), LATE.values(), ids=LATE)
def test_ill_fitting_tensor_of_the_last_stage_is_named(
    server: EmbeddedServer, late_call: Tensors, name: str, tensor: npt.NDArray[Any]
) -> None:
    check_refused(server, "language_late", {**late_call, name: tensor}, name)


def test_bad_image_is_refused_by_the_encoder(server: EmbeddedServer) -> None:
    with pytest.raises(InferenceServerException, match=r"image\[1\]") as caught:
        encode(server, PICTURE, PICTURE[:100])
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"


def test_image_of_another_type_is_named(server: EmbeddedServer) -> None:
    with pytest.raises(InferenceServerException, match="image"):
        infer(server, "vision_encoder", {"image": np.zeros(3, np.float32)}, ["image_grid_thw"])


def test_unknown_output_is_named(server: EmbeddedServer, early_call: Tensors) -> None:
    with pytest.raises(InferenceServerException, match="ds_9"):
        infer(server, "language_early", early_call, ["hidden_states", "ds_9"])
