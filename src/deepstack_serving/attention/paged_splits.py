"""Kernels of paged attention for sequences of one query: the context in splits, so that few sequences fill a GPU."""

import triton
import triton.language as tl

from deepstack_serving.attention.paged_kernels import LOWEST, attend_span, average, store_result

# Signatures of one argument a line would hide what the kernels do.
# fmt: off
#
# A kernel that `starts_early` may run beside the one before it, which it waits for as a whole. Before that it reads the
# step's layout alone, which that kernel did not write; past L1, where an earlier step's may still lie.


@triton.jit
def wait_for_previous(starts_early: tl.constexpr):
    """All that earlier kernels wrote can be read from here on, and the next kernel may start early in its turn."""
    if starts_early:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def place_of(query_starts, context_lengths, slots, sequence, sequences):
    """A sequence's first row, how many it has, its context, and the slot of its row if it is one; none: no rows."""
    there = sequence < sequences
    row = tl.load(query_starts + sequence, mask=there, other=0, cache_modifier=".cg")
    count = tl.load(query_starts + sequence + 1, mask=there, other=0, cache_modifier=".cg") - row
    context = tl.load(context_lengths + sequence, mask=there, other=0, cache_modifier=".cg")
    return row, count, context, tl.load(slots + row, mask=count == 1, other=-1, cache_modifier=".cg")


@triton.jit
def share_of(context, splits, tile: tl.constexpr):
    """How many positions of the context each split has: whole tiles, so the last splits can be left with none."""
    return tl.cdiv(tl.cdiv(context, splits), tile) * tile


@triton.jit
def own_row(source, row, row_stride, head, head_stride, keep, dim: tl.constexpr, padded: tl.constexpr):
    """[padded]: one row's key (or value) of one KV head; zeros unless `keep`."""
    column = tl.arange(0, padded)
    at = row.to(tl.int64) * row_stride + head * head_stride + column
    return tl.load(source + at, mask=(column < dim) & keep, other=0.0)


@triton.jit
def place_row(
    key, key_row, key_head, value, value_row, value_head, keys, values, slots, output, row, total_rows, kv_head,
    group: tl.constexpr, kv_heads: tl.constexpr, dim: tl.constexpr, padded: tl.constexpr,
):
    """What `write_rows` does, for one row."""
    slot, column = tl.load(slots + row), tl.arange(0, padded)
    to, keep = (slot * kv_heads + kv_head) * dim + column, (column < dim) & (slot >= 0)
    tl.store(keys + to, own_row(key, row, key_row, kv_head, key_head, slot >= 0, dim, padded), mask=keep)
    tl.store(values + to, own_row(value, row, value_row, kv_head, value_head, slot >= 0, dim, padded), mask=keep)
    if row >= total_rows:
        for member in range(group):
            at = ((row.to(tl.int64) * kv_heads + kv_head) * group + member) * dim + column
            tl.store(output + at, tl.zeros([padded], output.dtype.element_ty), mask=column < dim)


@triton.jit
def start_sums(
    query, key, key_row, key_head, value, value_row, value_head, row, kv_head, scale, new,
    height: tl.constexpr, dim: tl.constexpr, padded: tl.constexpr,
):
    """What attention starts from: the step's own token if `new`, else nothing."""
    own_key = own_row(key, row, key_row, kv_head, key_head, new, dim, padded).to(tl.float32)
    own_value = own_row(value, row, value_row, kv_head, value_head, new, dim, padded).to(tl.float32)
    logits = tl.sum(query.to(tl.float32) * own_key[None, :], 1) * scale
    peak = tl.where(new, logits, LOWEST)
    total = tl.where(new, 1.0, 0.0) + tl.zeros([height], tl.float32)
    return own_value[None, :] + tl.zeros([height, padded], tl.float32), peak, total


@triton.jit
def store_part(parts, part_weights, sums, peak, total, place, keep, padded: tl.constexpr):
    """A split's own average of the values, and its weight beside the other splits' (a logarithm to base 2)."""
    at = (place.to(tl.int64) * padded)[:, None] + tl.arange(0, padded)[None, :]
    tl.store(parts + at, average(sums, total), mask=keep[:, None])
    weight = tl.where(total > 0, peak + tl.log2(tl.where(total > 0, total, 1.0)), LOWEST)
    tl.store(part_weights + place, weight, mask=keep)


@triton.jit(do_not_specialize=["rows", "sequences", "splits"])
def attend_splits(
    query, query_row, query_head, key, key_row, key_head, value, value_row, value_head, keys, values, slots, output,
    parts, part_weights, block_tables, table_row, query_starts, context_lengths, scale, rows, sequences, splits,
    group: tl.constexpr, height: tl.constexpr, kv_heads: tl.constexpr, dim: tl.constexpr, padded: tl.constexpr,
    block_size: tl.constexpr, tile: tl.constexpr, writes: tl.constexpr, direct: tl.constexpr,
    starts_early: tl.constexpr,
):
    """Program (s, h, p): split p of the context of sequence s, if it has one query, for the query heads of KV head h.

    With `writes`, program (s, h, 0) also does for row s what `write_rows` does; the step's own token is then read
    from `key` and `value`, so no program waits for another's write. Unless `direct`, results go to `parts`.
    """
    sequence, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    total_rows = tl.load(query_starts + sequences, cache_modifier=".cg")
    row, count, context, slot = place_of(query_starts, context_lengths, slots, sequence, sequences)
    wait_for_previous(starts_early)
    if writes and (split == 0 and sequence < rows):
        place_row(key, key_row, key_head, value, value_row, value_head, keys, values, slots, output, sequence,
                  total_rows, kv_head, group, kv_heads, dim, padded)
    share = share_of(context, splits, tile)
    if count != 1 or (split > 0 and split * share >= context):
        return
    member, column = tl.arange(0, height), tl.arange(0, padded)
    keep, head = (member < group)[:, None] & (column < dim)[None, :], kv_head * group + member
    at = row.to(tl.int64) * query_row + (head * query_head)[:, None] + column[None, :]
    block = tl.load(query + at, mask=keep, other=0.0)
    new = (slot >= 0) & (context > 0) & writes
    sums, peak, total = start_sums(block, key, key_row, key_head, value, value_row, value_head, row, kv_head, scale,
                                   new & (split == 0), height, dim, padded)
    first, end = split * share, tl.minimum(split * share + share, context - new.to(tl.int32))
    whole, last = first + tl.maximum(end - first, 0) // tile * tile, tl.zeros([height], tl.int32) + (end - 1)
    table = block_tables + sequence.to(tl.int64) * table_row
    sums, peak, total = attend_span(sums, peak, total, block, keys, values, table, last, first, whole, end, kv_head,
                                    scale, kv_heads, dim, padded, block_size, tile)
    if direct:
        store_result(output, sums, total, row, head, keep, kv_heads * group, dim, padded)
    else:
        store_part(parts, part_weights, sums, peak, total, (sequence * kv_heads * group + head) * splits + split,
                   member < group, padded)


@triton.jit(do_not_specialize=["splits"])
def merge_splits(
    parts, part_weights, output, query_starts, context_lengths, splits, padded_splits: tl.constexpr,
    heads: tl.constexpr, dim: tl.constexpr, padded: tl.constexpr, tile: tl.constexpr, starts_early: tl.constexpr,
):
    """Program (s, h): query head h's parts of the sequence, weighed, into its row."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    row = tl.load(query_starts + sequence, cache_modifier=".cg")
    count = tl.load(query_starts + sequence + 1, cache_modifier=".cg") - row
    context = tl.load(context_lengths + sequence, cache_modifier=".cg")
    wait_for_previous(starts_early)
    if count != 1:
        return
    split, column = tl.arange(0, padded_splits), tl.arange(0, padded)
    there = (split < splits) & ((split == 0) | (split * share_of(context, splits, tile) < context))
    place = (sequence * heads + head) * splits + split
    weight = tl.load(part_weights + place, mask=there, other=float("-inf"))
    weight = tl.exp2(weight - tl.max(weight, 0))
    part = tl.load(parts + (place.to(tl.int64) * padded)[:, None] + column[None, :], mask=there[:, None], other=0.0)
    total = tl.sum(weight, 0)
    result = tl.sum(part * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
    at = (row.to(tl.int64) * heads + head) * dim + column
    tl.store(output + at, result.to(output.dtype.element_ty), mask=column < dim)
