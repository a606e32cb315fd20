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

HEADS, KV_HEADS, DIM, FIRST_LAYER, LAYER = 4, 2, 8, 3, 4
SHAPE = KVShape(KV_HEADS, DIM, torch.float32)
SCALE = DIM**-0.5


def random_rows(heads: int, rows: int, seed: int) -> torch.Tensor:
    return torch.randn(1, heads, rows, DIM, generator=torch.Generator().manual_seed(seed))


def pool(blocks: int, block_size: int, fill: float = float("nan")) -> KVPool:
    """A pool whose every slot would spoil what reads it by mistake."""
    made = KVPool(FIRST_LAYER, 2, blocks, block_size, SHAPE, "cpu")
    made.keys.fill_(fill)
    made.values.fill_(fill)
    return made


def call(queries: list[int], contexts: list[int], tables: torch.Tensor | None) -> LanguageCall:
    return LanguageCall({}, queries, contexts, tables, {})


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, step: PackedStep) -> torch.Tensor:
    return packed_attention(SimpleNamespace(layer_idx=LAYER), query, key, value, None, SCALE, packed=step)[0]


def plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """One sequence, all of it at once, keys repeated: [1, rows, heads, dim]."""
    repeated = [tensor.repeat_interleave(HEADS // KV_HEADS, 1) for tensor in (key, value)]
    return functional.scaled_dot_product_attention(query, *repeated, is_causal=True, scale=SCALE).transpose(1, 2)


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("cut", [[11], [1] * 11, [7, 4], [5, 5, 1], [3, 1, 7]], ids=str)
@pytest.mark.parametrize("reverse", [False, True], ids=["contiguous", "gathered"])
def test_steps_over_the_pool_equal_one_pass(block_size: int, cut: list[int], reverse: bool) -> None:
    query, key, value = (random_rows(heads, 11, seed) for seed, heads in enumerate((HEADS, KV_HEADS, KV_HEADS)))
    blocks = list(range(-(-11 // block_size)))
    table, memory = torch.tensor([blocks[::-1] if reverse else blocks]), pool(len(blocks), block_size)
    outputs, start = [], 0
    for size in cut:
        rows = slice(start, start + size)
        step = packed_step(call([size], [start + size], table), memory, "cpu")
        outputs.append(attend(query[:, :, rows], key[:, :, rows], value[:, :, rows], step))
        start += size
    torch.testing.assert_close(torch.cat(outputs, 1), plain(query, key, value))


def test_contiguous_blocks_are_read_as_a_view_with_the_same_result() -> None:
    query, key, value = random_rows(HEADS, 1, 0), random_rows(KV_HEADS, 1, 1), random_rows(KV_HEADS, 1, 2)
    memory = pool(4, 2, fill=0.5)
    slots = torch.tensor([2 * 2 + 1])
    results = [
        attend(query, key, value, PackedStep((PackedSequence(0, 1, 4, blocks),), memory, slots))
        for blocks in (1, torch.tensor([1, 2]))
    ]
    assert torch.equal(*results)


def test_packed_sequences_do_not_see_each_other() -> None:
    lengths = [5, 1, 3]
    inputs = [
        tuple(random_rows(heads, size, 10 * size + heads) for heads in (HEADS, KV_HEADS, KV_HEADS)) for size in lengths
    ]
    tables = torch.tensor([[4, 1, 0], [2, 0, 0], [3, 5, 0]])
    packed = [torch.cat(rows, 2) for rows in zip(*inputs, strict=True)]
    step = packed_step(call(lengths, lengths, tables), pool(6, 2), "cpu")
    expected = torch.cat([plain(*rows) for rows in inputs], 1)
    torch.testing.assert_close(attend(*packed, step), expected)


def test_stateless_call_equals_the_pool() -> None:
    query, key, value = random_rows(HEADS, 6, 0), random_rows(KV_HEADS, 6, 1), random_rows(KV_HEADS, 6, 2)
    step = packed_step(call([4, 2], [4, 2], None), pool(1, 1), "cpu")
    parts = [plain(*(tensor[:, :, rows] for tensor in (query, key, value))) for rows in (slice(4), slice(4, 6))]
    torch.testing.assert_close(attend(query, key, value, step), torch.cat(parts, 1))


def test_keys_go_to_the_blocks_of_their_layer_and_nowhere_else() -> None:
    memory = pool(4, 2)
    step = packed_step(call([3], [3], torch.tensor([[3, 1]])), memory, "cpu")
    attend(random_rows(HEADS, 3, 0), random_rows(KV_HEADS, 3, 1), random_rows(KV_HEADS, 3, 2), step)
    written = memory.keys.isfinite().all(-1).all(-1)
    assert written.nonzero().tolist() == [[1, 1, 0], [1, 3, 0], [1, 3, 1]]
    assert torch.equal(memory.values.isfinite().all(-1).all(-1), written)


def test_decode_and_prefill_share_one_step() -> None:
    """A sequence goes on at its fourth token while another begins."""
    first = [random_rows(heads, 4, heads) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    second = [random_rows(heads, 5, heads + 9) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    memory, tables = pool(5, 2), torch.tensor([[4, 2, 0], [0, 1, 3]])
    attend(*(rows[:, :, :3] for rows in first), packed_step(call([3], [3], tables[:1]), memory, "cpu"))
    joined = [torch.cat([a[:, :, 3:], b], 2) for a, b in zip(first, second, strict=True)]
    result = attend(*joined, packed_step(call([1, 5], [4, 5], tables), memory, "cpu"))
    expected = torch.cat([plain(*first)[:, 3:], plain(*second)], 1)
    torch.testing.assert_close(result, expected)


def test_pool_numbers_layers_as_the_checkpoint_does() -> None:
    plan = plan_stages(6, 2, [FIRST_LAYER], ())[1]
    memory = KVPool(plan.first_layer, plan.end_layer - plan.first_layer, 2, 2, SHAPE, "cpu")
    keys, values = memory.layer(5)
    assert (keys.data_ptr(), values.data_ptr()) == (memory.keys[2].data_ptr(), memory.values[2].data_ptr())
