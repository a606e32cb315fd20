"""Calls to a language stage that are wrong in one thing: each is refused by the tensor's name, before any write."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from deepstack_serving.errors import WireError
from deepstack_serving.injection import StagePlan, plan_stages
from deepstack_serving.stages.call import LanguageCall, check_placeholders, parse_call
from deepstack_serving.wire import FeatureContract, language_interface

CONTRACT = FeatureContract("FP32", 8, 3, (0, 1, 2), True)
ONLY, FIRST, LAST = 0, 1, 2
PLANS: tuple[StagePlan, ...] = (*plan_stages(6, 1, [], (0, 1, 2)), *plan_stages(6, 2, [1], (0, 1, 2)))
IMAGE, BLOCKS, BLOCK_SIZE = 99, 4, 4
Tensors = dict[str, torch.Tensor]
Change = Callable[[Tensors], object]


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def good_call(which: int = ONLY) -> Tensors:
    """Two sequences: five new rows with two image tokens, and one row that continues at token 7."""
    features = ["image_embeds", "ds_0", "ds_1", "ds_2"] if which != LAST else ["ds_1", "ds_2"]
    tensors = {
        "position_ids": torch.zeros(3, 6, dtype=torch.int64),
        "query_lengths": int32(5, 1),
        "context_lengths": int32(5, 7),
        "block_tables": torch.stack([int32(0, 1), int32(3, 2)]),
        "image_rows": torch.tensor([1, 2]),
        "feature_rows": torch.tensor([0, 1]),
        **{name: torch.zeros(2, 8) for name in features},
    }
    if which == LAST:
        tensors["hidden_states"] = torch.zeros(6, 8)
    else:
        tensors["input_ids"] = torch.tensor([5, IMAGE, IMAGE, 6, 7, 8])
    if which != FIRST:
        tensors["sample_rows"] = torch.tensor([4, 5])
    return tensors


def parse(tensors: Tensors, which: int = ONLY) -> LanguageCall:
    plan = PLANS[which]
    return parse_call(tensors, language_interface(CONTRACT, plan), CONTRACT, plan, BLOCKS, BLOCK_SIZE)


def put(name: str, tensor: torch.Tensor) -> Change:
    return lambda tensors: tensors.__setitem__(name, tensor)


def drop(*names: str) -> Change:
    return lambda tensors: [tensors.pop(name) for name in names]


@pytest.mark.parametrize("which", [ONLY, FIRST, LAST])
def test_good_call_is_parsed(which: int) -> None:
    call = parse(good_call(which), which)
    assert (call.query_lengths, call.context_lengths, call.has_images) == ([5, 1], [5, 7], True)


@pytest.mark.parametrize("which", [ONLY, FIRST, LAST])
def test_call_without_images_has_no_features(which: int) -> None:
    tensors = {name: tensor for name, tensor in good_call(which).items() if name not in ("image_rows", "feature_rows")}
    text = {name: tensor for name, tensor in tensors.items() if not name.startswith(("ds_", "image_embeds"))}
    assert not parse(text, which).has_images


@pytest.mark.parametrize(("sent", "eager"), [({}, False), ({"eager": [True]}, True), ({"eager": [False]}, False)])
def test_call_says_whether_it_must_run_eagerly(sent: dict[str, list[bool]], eager: bool) -> None:
    assert parse(good_call() | {name: torch.tensor(value) for name, value in sent.items()}).eager is eager


def test_empty_block_table_is_a_stateless_call() -> None:
    tensors = good_call() | {"block_tables": torch.zeros(2, 0, dtype=torch.int32), "context_lengths": int32(5, 1)}
    assert parse(tensors).block_tables is None


@pytest.mark.parametrize("which", [ONLY, FIRST, LAST])
def test_every_required_tensor_is_missed(which: int) -> None:
    for spec in language_interface(CONTRACT, PLANS[which]).inputs:
        if not spec.optional:
            tensors = good_call(which)
            del tensors[spec.name]
            with pytest.raises(WireError, match=f"{spec.name!r} is missing"):
                parse(tensors, which)


@pytest.mark.parametrize("which", [ONLY, FIRST, LAST])
def test_wrong_type_is_refused_for_every_tensor(which: int) -> None:
    for name, tensor in good_call(which).items():
        with pytest.raises(WireError, match=f"{name!r} has type FP16; expected"):
            parse(good_call(which) | {name: tensor.half()}, which)


@pytest.mark.parametrize("which", [ONLY, FIRST, LAST])
def test_wrong_rank_is_refused_for_every_tensor(which: int) -> None:
    for name, tensor in good_call(which).items():
        with pytest.raises(WireError, match=rf"{name!r} has shape \[1, "):
            parse(good_call(which) | {name: tensor[None]}, which)


@pytest.mark.parametrize("name", ["image_embeds", "ds_0", "ds_1", "ds_2"])
def test_wrong_width_is_refused_for_every_feature(name: str) -> None:
    with pytest.raises(WireError, match=rf"{name!r} has shape \[2, 7\]; expected \[-1, 8\]"):
        parse(good_call() | {name: torch.zeros(2, 7)})


@pytest.mark.parametrize(("which", "name"), [(ONLY, "image_embeds"), (ONLY, "ds_0"), (FIRST, "ds_2"), (LAST, "ds_1")])
def test_lost_feature_is_named(which: int, name: str) -> None:
    tensors = good_call(which)
    del tensors[name]
    with pytest.raises(WireError, match=rf"{name!r} is missing: the call has 2 image rows"):
        parse(tensors, which)


@pytest.mark.parametrize("name", ["ds_0", "image_embeds", "input_ids", "ds_9"])
def test_tensor_that_the_stage_does_not_take_is_named(name: str) -> None:
    with pytest.raises(WireError, match=f"unexpected tensor {name!r}"):
        parse(good_call(LAST) | {name: torch.zeros(2, 8)}, LAST)


REFUSED: dict[str, tuple[Change, str]] = {
    "position rows": (put("position_ids", torch.zeros(3, 7, dtype=torch.int64)), "'query_lengths' is [5, 1]"),
    "position axes": (put("position_ids", torch.zeros(1, 6, dtype=torch.int64)), "'position_ids' has shape [1, 6]"),
    "id rows": (put("input_ids", torch.zeros(5, dtype=torch.int64)), "'position_ids' has 6"),
    "query sum": (put("query_lengths", int32(5, 2)), "'query_lengths' is [5, 2]"),
    "query zero": (put("query_lengths", int32(6, 0)), "'query_lengths' is [6, 0]"),
    "query negative": (put("query_lengths", int32(7, -1)), "'query_lengths' is [7, -1]"),
    "context below query": (put("context_lengths", int32(4, 7)), "'context_lengths' is [4, 7]"),
    "context count": (put("context_lengths", int32(5)), "'context_lengths' has 1"),
    "stateless with context": (drop("block_tables"), "stateless"),
    "table rows": (put("block_tables", int32(0, 1)[None]), "'block_tables' has 1 rows for 2"),
    "table too short": (put("block_tables", torch.stack([int32(0), int32(1)])), "'block_tables' row 0"),
    "block too high": (put("block_tables", torch.stack([int32(0, 1), int32(3, 4)])), "'block_tables' row 1"),
    "block negative": (put("block_tables", torch.stack([int32(0, -1), int32(3, 2)])), "'block_tables' row 0"),
    "no image rows": (drop("image_rows"), "came without the rows that map them"),
    "no feature rows": (drop("feature_rows"), "came without the rows that map them"),
    "no maps": (drop("image_rows", "feature_rows"), "['image_embeds', 'ds_0', 'ds_1', 'ds_2'] came without"),
    "empty image rows": (put("image_rows", torch.zeros(0, dtype=torch.int64)), "came without the rows that map them"),
    "image row too high": (put("image_rows", torch.tensor([1, 6])), "'image_rows' names a row outside 0 to 5"),
    "image row negative": (put("image_rows", torch.tensor([-1, 2])), "'image_rows' names a row outside 0 to 5"),
    "image row twice": (put("image_rows", torch.tensor([1, 1])), "'image_rows' must be distinct"),
    "feature row too high": (put("feature_rows", torch.tensor([0, 2])), "'feature_rows' names a row outside 0 to 1"),
    "feature row negative": (put("feature_rows", torch.tensor([-1, 0])), "'feature_rows' names a row outside 0 to 1"),
    "feature row count": (put("feature_rows", torch.tensor([0])), "'feature_rows' of the same length"),
    "feature of other rows": (put("ds_1", torch.zeros(3, 8)), "must have the same number of rows"),
    "features empty": (put("ds_1", torch.zeros(0, 8)), "must have the same number of rows"),
    "sample row too high": (put("sample_rows", torch.tensor([4, 6])), "'sample_rows' names a row outside 0 to 5"),
    "sampling in part": (put("temperature", torch.ones(2)), "sampling tensors come all or none; got ['temperature']"),
    "forced rows": (put("forced_ids", torch.tensor([1])), "'forced_ids' has 1 rows for 2"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_ill_fitting_call_is_refused(case: str) -> None:
    change, text = REFUSED[case]
    tensors = good_call()
    change(tensors)
    with pytest.raises(WireError, match=re.escape(text)):
        parse(tensors)


def test_sampling_tensor_of_other_rows_is_refused() -> None:
    sampling = {"temperature": torch.ones(2), "top_k": int32(0, 0), "top_p": torch.ones(2), "min_p": torch.ones(1)}
    sampling["seed"] = torch.zeros(2, 2, dtype=torch.int64)
    with pytest.raises(WireError, match="'min_p' has 1 rows for 2 'sample_rows'"):
        parse(good_call() | sampling)


def test_placeholders_that_are_mapped_pass() -> None:
    check_placeholders(parse(good_call()), [IMAGE])


@pytest.mark.parametrize(
    "ids",
    [[5, IMAGE, IMAGE, IMAGE, 7, 8], [5, 4, IMAGE, 6, 7, 8], [IMAGE, 5, IMAGE, 6, 7, 8]],
    ids=["one more", "one fewer", "moved"],
)
def test_image_rows_that_are_not_the_placeholders_are_refused(ids: list[int]) -> None:
    with pytest.raises(WireError, match="'image_rows' maps 2 rows"):
        check_placeholders(parse(good_call() | {"input_ids": torch.tensor(ids)}), [IMAGE])


def test_prompt_whose_features_are_lost_is_refused() -> None:
    tensors = good_call()
    drop("image_rows", "feature_rows", "image_embeds", "ds_0", "ds_1", "ds_2")(tensors)
    with pytest.raises(WireError, match="'image_rows' maps 0 rows, but the prompts of this call hold 2 image tokens"):
        check_placeholders(parse(tensors), [IMAGE])


def test_placeholder_that_the_model_generated_binds_no_image() -> None:
    tensors = good_call()
    tensors["input_ids"][5] = IMAGE
    check_placeholders(parse(tensors), [IMAGE])
