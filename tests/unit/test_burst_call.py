"""Linked calls, of one step and of several, that are wrong in one thing: refused by name, before any write."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from deepstack_serving.errors import WireError
from deepstack_serving.injection import StagePlan, plan_stages
from deepstack_serving.stages.burst_call import Burst
from deepstack_serving.stages.call import LanguageCall, parse_call
from deepstack_serving.wire import FeatureContract, language_interface

CONTRACT = FeatureContract("FP32", 8, 3, (0, 1), True)
ONLY, FIRST, MIDDLE, LAST = range(4)
PLANS: tuple[StagePlan, ...] = (*plan_stages(6, 1, [], (0, 1)), *plan_stages(6, 3, [1, 2], (0, 1)))
BLOCKS, BLOCK_SIZE, STEPS = 4, 4, 3
Tensors = dict[str, torch.Tensor]
Change = Callable[[Tensors], object]
TICKET = "deepstack_1_2_exchange_ab:5"


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def good_call(which: int) -> Tensors:
    """Two sequences that come to six and eight tokens: as many as their blocks hold."""
    tensors = {
        "position_ids": torch.zeros(3, 2, dtype=torch.int64),
        "query_lengths": int32(1, 1),
        "context_lengths": int32(4, 6),
        "block_tables": torch.stack([int32(0, 1), int32(3, 2)]),
        "decode_steps": int32(STEPS),
    }
    tensors["exchange"] = torch.tensor(list(TICKET.encode()), dtype=torch.uint8)
    if which in (ONLY, FIRST):
        tensors["input_ids"] = torch.tensor([5, 6])
    else:
        tensors["hidden_states"] = torch.zeros(0, 8)
    if which in (ONLY, LAST):
        tensors["sample_rows"] = torch.tensor([0, 1])
    return tensors


def parse(tensors: Tensors, which: int) -> LanguageCall:
    plan = PLANS[which]
    return parse_call(tensors, language_interface(CONTRACT, plan), CONTRACT, plan, BLOCKS, BLOCK_SIZE)


@pytest.mark.parametrize("which", [ONLY, FIRST, MIDDLE, LAST])
def test_good_burst_is_parsed(which: int) -> None:
    assert parse(good_call(which), which).burst == Burst(STEPS, TICKET)


def test_one_step_needs_no_exchange() -> None:
    tensors = good_call(FIRST) | {"decode_steps": int32(1)}
    del tensors["exchange"]
    assert parse(tensors, FIRST).burst == Burst(1, "")


def put(name: str, tensor: torch.Tensor) -> Change:
    return lambda tensors: tensors.__setitem__(name, tensor)


def drop(name: str) -> Change:
    return lambda tensors: tensors.pop(name)


def one_row_more(tensors: Tensors) -> None:
    entering = "input_ids" if "input_ids" in tensors else "hidden_states"
    tensors["position_ids"] = torch.zeros(3, 3, dtype=torch.int64)
    tensors["query_lengths"] = int32(1, 2)
    tensors[entering] = torch.cat([tensors[entering], tensors[entering][:1]])


def no_rows(tensors: Tensors) -> None:
    tensors["position_ids"] = torch.zeros(3, 0, dtype=torch.int64)
    for name in ("query_lengths", "context_lengths", "block_tables", "input_ids"):
        tensors[name] = tensors[name][:0]


def stateless(tensors: Tensors) -> None:
    del tensors["block_tables"]
    tensors["context_lengths"] = int32(1, 1)


def with_image(tensors: Tensors) -> None:
    tensors |= {"image_rows": torch.tensor([0]), "feature_rows": torch.tensor([0])}
    tensors |= {name: torch.zeros(1, 8) for name in ("image_embeds", "ds_0", "ds_1")}


@pytest.mark.parametrize(
    ("which", "change", "text"),
    [
        (FIRST, put("decode_steps", int32(0)), "'decode_steps' is 0; allowed: 1 to 64"),
        (FIRST, put("decode_steps", int32(65)), "'decode_steps' is 65; allowed: 1 to 64"),
        (FIRST, drop("exchange"), "'exchange' is missing: the call has 3 decode steps"),
        (ONLY, drop("exchange"), "'exchange' is missing"),
        (FIRST, one_row_more, "'query_lengths' must be 1 for every sequence"),
        (FIRST, no_rows, "there must be one at least"),
        (FIRST, stateless, "'block_tables' is missing with several"),
        (FIRST, with_image, "'image_rows' is not taken"),
        (LAST, put("forced_ids", torch.tensor([1, 2])), "'forced_ids' is not taken"),
        (LAST, put("sample_rows", torch.tensor([1, 0])), "'sample_rows' must name every row in order"),
        (LAST, put("sample_rows", torch.tensor([0])), "'sample_rows' must name every row in order"),
        (MIDDLE, put("hidden_states", torch.zeros(2, 8)), "'hidden_states' has 2 rows; 0 are expected"),
        (FIRST, put("input_ids", torch.tensor([1])), "'input_ids' has 1 rows; 2 are expected"),
        (FIRST, put("context_lengths", int32(4, 7)), "row 1 must name 3 blocks below 4 for 9 tokens"),
        (MIDDLE, put("block_tables", torch.stack([int32(0, 9), int32(3, 2)])), "row 0 must name 2 blocks below 4"),
    ],
)
def test_wrong_burst_is_refused(which: int, change: Change, text: str) -> None:
    tensors = good_call(which)
    change(tensors)
    with pytest.raises(WireError, match=text):
        parse(tensors, which)


@pytest.mark.parametrize("which", [ONLY, FIRST, MIDDLE, LAST])
def test_one_step_of_a_prompt_may_be_linked(which: int) -> None:
    call = parse(prompt(good_call(which)), which)
    assert call.burst == Burst(1, TICKET)
    assert call.burst.is_linked


def prompt(tensors: Tensors) -> Tensors:
    """The same with a prompt of three tokens, of which two are sampled, beside a sequence that decodes."""
    tensors |= {"position_ids": torch.zeros(3, 4, dtype=torch.int64), "query_lengths": int32(1, 3)}
    if "input_ids" in tensors:
        tensors["input_ids"] = torch.tensor([5, 6, 7, 8])
    if "sample_rows" in tensors:
        tensors["sample_rows"] = torch.tensor([0, 3])
    return tensors | {"decode_steps": int32(1)}


@pytest.mark.parametrize(
    ("which", "change", "text"),
    [
        (
            MIDDLE,
            lambda t: t.update(hidden_states=torch.zeros(4, 8)),
            "'hidden_states' has 4 rows; 0 are expected with",
        ),
        (FIRST, lambda t: t.update(input_ids=torch.tensor([1])), "'input_ids' has 1 rows; 4 are expected with"),
        (FIRST, with_image, r"features for the layers \[1\] of later stages"),
    ],
)
def test_wrong_linked_step_is_refused(which: int, change: Change, text: str) -> None:
    tensors = prompt(good_call(which))
    change(tensors)
    with pytest.raises(WireError, match=text):
        parse(tensors, which)
