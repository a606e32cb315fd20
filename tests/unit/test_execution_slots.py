"""Slots of captured graphs: absent clears, what fits is copied and the tail cleared, else it raises unwritten."""

from __future__ import annotations

import pytest
import torch

from deepstack_serving.errors import StageError
from deepstack_serving.execution.buckets import bucket_for, needed_sizes
from deepstack_serving.execution.rows import StepRows
from deepstack_serving.execution.slots import Scattered, SlotRegistry, SlotSpec


@pytest.fixture
def slots() -> SlotRegistry:
    return SlotRegistry(
        (
            SlotSpec("ds_0", (8, 3), torch.float32, "cpu"),
            SlotSpec("slots", (8,), torch.int64, "cpu", empty=-1),
            SlotSpec("block_tables", (4, 5), torch.int32, "cpu", free=(0, 1)),
        ),
        "cpu",
    )


def full(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, 7, dtype=dtype)


def test_a_slot_begins_empty(slots: SlotRegistry) -> None:
    assert not slots.buffer("ds_0").any()
    assert slots.buffer("slots").eq(-1).all()


def test_a_fitting_tensor_is_copied(slots: SlotRegistry) -> None:
    value = torch.arange(24.0).reshape(8, 3)
    slots.refresh({"ds_0": value})
    assert torch.equal(slots.buffer("ds_0"), value)


@pytest.mark.parametrize("shorter", [1, 5, 7])
def test_the_tail_of_an_earlier_tensor_is_cleared(slots: SlotRegistry, shorter: int) -> None:
    slots.refresh({"ds_0": full(8, 3), "slots": full(8, dtype=torch.int64)})
    slots.refresh({"ds_0": full(shorter, 3), "slots": full(shorter, dtype=torch.int64)})
    assert slots.buffer("ds_0")[:shorter].eq(7).all()
    assert not slots.buffer("ds_0")[shorter:].any()
    assert slots.buffer("slots").tolist() == [7] * shorter + [-1] * (8 - shorter)


def test_both_free_dimensions_are_cleared(slots: SlotRegistry) -> None:
    slots.refresh({"block_tables": full(4, 5, dtype=torch.int32)})
    slots.refresh({"block_tables": full(2, 3, dtype=torch.int32)})
    expected = torch.zeros(4, 5, dtype=torch.int32)
    expected[:2, :3] = 7
    assert torch.equal(slots.buffer("block_tables"), expected)


def scattered(rows: list[int], extent: int, values: torch.Tensor | None = None) -> Scattered:
    """Rows of 7, the last one of which comes first."""
    count = len(rows)
    filled = full(count, 3) if values is None else values
    return Scattered(filled, torch.tensor(rows), torch.arange(count - 1, -1, -1), extent)


def test_scattered_rows_are_put_where_they_belong_and_all_others_cleared(slots: SlotRegistry) -> None:
    slots.refresh({"ds_0": full(8, 3)})
    slots.refresh({"ds_0": scattered([1, 4], 6, torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))})
    expected = torch.zeros(8, 3)
    expected[1], expected[4] = torch.tensor([4.0, 5.0, 6.0]), torch.tensor([1.0, 2.0, 3.0])
    assert torch.equal(slots.buffer("ds_0"), expected)
    slots.refresh({"ds_0": scattered([0], 2)})
    assert slots.buffer("ds_0").sum(1).tolist() == [21, 0, 0, 0, 0, 0, 0, 0]
    slots.refresh({})
    assert not slots.buffer("ds_0").any()


@pytest.mark.parametrize("value", [None, torch.zeros(0, 3)])
def test_absent_or_empty_clears(slots: SlotRegistry, value: torch.Tensor | None) -> None:
    slots.refresh({"ds_0": full(8, 3)})
    slots.refresh({"ds_0": value})
    assert not slots.buffer("ds_0").any()


def test_a_slot_that_is_not_named_is_cleared(slots: SlotRegistry) -> None:
    slots.refresh({"ds_0": full(8, 3)})
    slots.refresh({"slots": full(1, dtype=torch.int64)})
    assert not slots.buffer("ds_0").any()


ILL_FITTING: dict[str, torch.Tensor | Scattered] = {
    "too many rows": full(9, 3),
    "another width": full(8, 2),
    "another rank": full(8),
    "another rank with the right count": full(2, 4, 3),
    "another type": full(8, 3, dtype=torch.float64),
    "another device": torch.empty(8, 3, device="meta"),
    "scattered over too many rows": scattered([0], 9),
    "scattered, another width": scattered([0], 2, full(1, 2)),
    "scattered, another rank": scattered([0], 2, full(1)),
    "scattered, another type": scattered([0], 2, full(1, 3, dtype=torch.float64)),
    "scattered, another device": scattered([0], 2, torch.empty(1, 3, device="meta")),
}


@pytest.mark.parametrize("case", ILL_FITTING)
def test_what_does_not_fit_raises_before_any_write(slots: SlotRegistry, case: str) -> None:
    before = {"ds_0": torch.arange(12.0).reshape(4, 3), "slots": torch.arange(3)}
    slots.refresh(before)
    with pytest.raises(StageError, match="slot 'ds_0' takes"):
        slots.refresh({"slots": torch.arange(5), "ds_0": ILL_FITTING[case]})
    assert torch.equal(slots.buffer("ds_0")[:4], before["ds_0"])
    assert slots.buffer("slots").tolist() == [0, 1, 2, -1, -1, -1, -1, -1]


def test_an_unknown_name_raises_before_any_write(slots: SlotRegistry) -> None:
    slots.refresh({"ds_0": full(8, 3)})
    with pytest.raises(StageError, match="no slot 'ds_1'; there are ds_0, slots, block_tables"):
        slots.refresh({"ds_1": full(8, 3)})
    assert slots.buffer("ds_0").eq(7).all()


def test_a_registry_without_slots_holds_nothing() -> None:
    assert SlotRegistry((), "cpu").bytes == 0


@pytest.mark.parametrize(("size", "bucket"), [(1, 2), (2, 2), (3, 4), (4, 4), (5, 16), (16, 16), (17, None)])
def test_the_bucket_is_the_smallest_that_holds_the_size(size: int, bucket: int | None) -> None:
    assert bucket_for((2, 4, 16), size) == bucket


@pytest.mark.parametrize(
    ("largest", "needed"), [(1, (2,)), (4, (2, 4)), (5, (2, 4, 16)), (16, (2, 4, 16)), (99, (2, 4, 16))]
)
def test_only_sizes_that_occur_are_needed(largest: int, needed: tuple[int, ...]) -> None:
    assert needed_sizes((2, 4, 16), largest) == needed


def test_padding_rows_write_nothing_and_padding_sequences_own_no_row() -> None:
    step = StepRows(
        position_ids=torch.tensor([[4], [0], [1]]),
        slots=torch.tensor([36, 16, 17]),
        block_tables=torch.tensor([[2], [1]], dtype=torch.int32),
        query_starts=torch.tensor([0, 1, 3], dtype=torch.int32),
        context_lengths=torch.tensor([5, 2], dtype=torch.int32),
        max_query_length=2,
    )
    padded = step.padded(5, 4, 3, 5)
    assert padded.position_ids.flatten().tolist() == [4, 0, 1, 0, 0]
    assert padded.slots.tolist() == [36, 16, 17, -1, -1]
    assert padded.block_tables.tolist() == [[2, 0, 0], [1, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert padded.query_starts.tolist() == [0, 1, 3, 3, 3]
    assert padded.context_lengths.tolist() == [5, 2, 0, 0]
    assert padded.max_query_length == 5
