"""Attention over the paged pool: each sequence sees its own context, however its blocks lie."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from deepstack_serving.attention import PackedSequence, PackedStep, packed_attention
from deepstack_serving.injection import plan_stages
from deepstack_serving.kv_pool import KVPool, KVShape
from deepstack_serving.stages.call import LanguageCall
from deepstack_serving.stages.layout import packed_step

HEADS, KV_HEADS, DIM, FIRST_LAYER, LAYER = 6, 2, 8, 3, 4
SHAPE = KVShape(KV_HEADS, DIM, torch.float32)
SCALE = DIM**-0.5
Rows = list[torch.Tensor]


def random_rows(rows: int, seed: int = 0) -> Rows:
    """Queries, keys and values of one sequence, each [1, heads, rows, dim]."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, heads, rows, DIM, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS)]


def pool(blocks: int, block_size: int, fill: float = float("nan")) -> KVPool:
    """A pool whose every slot would spoil what reads it by mistake."""
    made = KVPool(FIRST_LAYER, 2, blocks, block_size, SHAPE, "cpu")
    made.keys.fill_(fill)
    made.values.fill_(fill)
    return made


def call(queries: list[int], contexts: list[int], tables: torch.Tensor | None) -> LanguageCall:
    return LanguageCall({}, queries, contexts, tables, {})


def attend(rows: Rows, step: PackedStep) -> torch.Tensor:
    query, key, value = rows
    return packed_attention(SimpleNamespace(layer_idx=LAYER), query, key, value, None, SCALE, packed=step)[0]


def plain(rows: Rows) -> torch.Tensor:
    """One sequence, all of it at once, keys repeated: [1, rows, heads, dim]."""
    query, key, value = (tensor.repeat_interleave(HEADS // tensor.shape[1], 1) for tensor in rows)
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=SCALE).transpose(1, 2)


def cut_rows(rows: Rows, start: int, end: int | None = None) -> Rows:
    return [tensor[:, :, start:end] for tensor in rows]


def join_rows(*parts: Rows) -> Rows:
    return [torch.cat(tensors, 2) for tensors in zip(*parts, strict=True)]


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("cut", [[11], [1] * 11, [7, 4], [5, 5, 1], [3, 1, 7]], ids=str)
@pytest.mark.parametrize("reverse", [False, True], ids=["contiguous", "gathered"])
def test_steps_over_the_pool_equal_one_pass(block_size: int, cut: list[int], reverse: bool) -> None:
    rows, blocks = random_rows(11), list(range(-(-11 // block_size)))
    table, memory = torch.tensor([blocks[::-1] if reverse else blocks]), pool(len(blocks), block_size)
    outputs, start = [], 0
    for size in cut:
        step = packed_step(call([size], [start + size], table), memory, "cpu")
        outputs.append(attend(cut_rows(rows, start, start + size), step))
        start += size
    torch.testing.assert_close(torch.cat(outputs, 1), plain(rows))


def test_contiguous_blocks_are_read_as_a_view_with_the_same_result() -> None:
    memory, slots = pool(4, 2, fill=0.5), torch.tensor([2 * 2 + 1])
    view, gathered = (
        attend(random_rows(1), PackedStep((PackedSequence(0, 1, 4, blocks),), memory, slots))
        for blocks in (1, torch.tensor([1, 2]))
    )
    assert torch.equal(view, gathered)


def test_packed_sequences_do_not_see_each_other() -> None:
    lengths = [5, 1, 3]
    inputs = [random_rows(size, seed=size) for size in lengths]
    step = packed_step(call(lengths, lengths, torch.tensor([[4, 1, 0], [2, 0, 0], [3, 5, 0]])), pool(6, 2), "cpu")
    expected = torch.cat([plain(rows) for rows in inputs], 1)
    torch.testing.assert_close(attend(join_rows(*inputs), step), expected)


def test_stateless_call_equals_separate_passes() -> None:
    rows = random_rows(6)
    step = packed_step(call([4, 2], [4, 2], None), pool(1, 1), "cpu")
    expected = torch.cat([plain(cut_rows(rows, 0, 4)), plain(cut_rows(rows, 4))], 1)
    torch.testing.assert_close(attend(rows, step), expected)


def test_keys_go_to_the_blocks_of_their_layer_and_nowhere_else() -> None:
    memory = pool(4, 2)
    attend(random_rows(3), packed_step(call([3], [3], torch.tensor([[3, 1]])), memory, "cpu"))
    written = memory.keys.isfinite().all(-1).all(-1)
    assert written.nonzero().tolist() == [[1, 1, 0], [1, 3, 0], [1, 3, 1]]
    assert torch.equal(memory.values.isfinite().all(-1).all(-1), written)


def test_decode_and_prefill_share_one_step() -> None:
    """A sequence goes on at its fourth token while another begins."""
    first, second = random_rows(4, seed=1), random_rows(5, seed=2)
    memory, tables = pool(5, 2), torch.tensor([[4, 2, 0], [0, 1, 3]])
    attend(cut_rows(first, 0, 3), packed_step(call([3], [3], tables[:1]), memory, "cpu"))
    step = packed_step(call([1, 5], [4, 5], tables), memory, "cpu")
    expected = torch.cat([plain(first)[:, 3:], plain(second)], 1)
    torch.testing.assert_close(attend(join_rows(cut_rows(first, 3), second), step), expected)


@pytest.mark.parametrize("lengths", [(5, 7), (7, 5), (6, 6)], ids=str)
def test_two_sequences_go_on_by_several_tokens_in_one_step(lengths: tuple[int, int]) -> None:
    """Both need a mask, and not the same one."""
    first, second = (random_rows(size, seed=place) for place, size in enumerate(lengths))
    memory, tables = pool(8, 2), torch.tensor([[6, 0, 1, 7], [2, 3, 5, 4]])
    attend(cut_rows(first, 0, 2), packed_step(call([2], [2], tables[:1]), memory, "cpu"))
    attend(cut_rows(second, 0, 3), packed_step(call([3], [3], tables[1:]), memory, "cpu"))
    step = packed_step(call([lengths[0] - 2, lengths[1] - 3], list(lengths), tables), memory, "cpu")
    expected = torch.cat([plain(first)[:, 2:], plain(second)[:, 3:]], 1)
    torch.testing.assert_close(attend(join_rows(cut_rows(first, 2), cut_rows(second, 3)), step), expected)


def test_pool_numbers_layers_as_the_checkpoint_does() -> None:
    plan = plan_stages(6, 2, [FIRST_LAYER], ())[1]
    memory = KVPool(plan.first_layer, plan.end_layer - plan.first_layer, 2, 2, SHAPE, "cpu")
    keys, values = memory.layer(5)
    assert (keys.data_ptr(), values.data_ptr()) == (memory.keys[2].data_ptr(), memory.values[2].data_ptr())
