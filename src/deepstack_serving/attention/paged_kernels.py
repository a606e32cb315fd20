"""Kernels of paged attention, in Triton's language: rows into the pool, and attention by tiles of queries.

The query heads of one KV head share a tile, so its keys and values are read once for all of them. Sums are float32,
logits are in units of log2. Memory outside a sequence's own context is never loaded: it may hold NaN.
"""

import triton
import triton.language as tl

# Signatures of one argument a line would hide what the kernels do.
# fmt: off
LOWEST = tl.constexpr(-1e30)  # finite: a peak that is still this low, less a hidden logit's -inf, is no NaN


@triton.jit
def pool_offsets(
    table, start, end, kv_head, kv_heads: tl.constexpr, dim: tl.constexpr, block_size: tl.constexpr, tile: tl.constexpr
):
    """[tile] int64: where the keys of the positions from `start` on begin; those from `end` on are in block 0."""
    within = tl.arange(0, tile)
    if block_size % tile == 0:  # the whole tile lies in one block
        block = tl.load(table + start // block_size).to(tl.int64)
        token = block * block_size + start % block_size + within
    else:
        position = start + within
        block = tl.load(table + position // block_size, mask=position < end, other=0).to(tl.int64)
        token = block * block_size + position % block_size
    return (token * kv_heads + kv_head) * dim


@triton.jit
def attend_tile(
    sums, peak, total, query, keys, values, offsets, last, start, end, scale, dim: tl.constexpr, padded: tl.constexpr,
    tile: tl.constexpr, masked: tl.constexpr,
):
    """One tile of the context added to the sums; row i sees positions up to last[i], all of them unless `masked`."""
    position, column = start + tl.arange(0, tile), tl.arange(0, padded)
    at = offsets[:, None] + column[None, :]
    at_transposed = offsets[None, :] + column[:, None]
    if masked or dim != padded:
        key = tl.load(keys + at_transposed, mask=(position < end)[None, :] & (column < dim)[:, None], other=0.0)
        value = tl.load(values + at, mask=(position < end)[:, None] & (column < dim)[None, :], other=0.0)
    else:
        key = tl.load(keys + at_transposed)
        value = tl.load(values + at)
    logits = tl.dot(query, key, input_precision="ieee") * scale
    if masked:
        logits = tl.where(position[None, :] <= last[:, None], logits, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(logits, 1))
    weights = tl.exp2(logits - new_peak[:, None])
    shrink = tl.exp2(peak - new_peak)
    sums = tl.dot(weights.to(value.dtype), value, sums * shrink[:, None], input_precision="ieee")
    return sums, new_peak, total * shrink + tl.sum(weights, 1)


@triton.jit
def attend_span(
    sums, peak, total, query, keys, values, table, last, first, whole, end, kv_head, scale, kv_heads: tl.constexpr,
    dim: tl.constexpr, padded: tl.constexpr, block_size: tl.constexpr, tile: tl.constexpr,
):
    """Context positions [first, end) added to the sums; those before `whole`, full tiles, need no mask."""
    for start in range(first, whole, tile):
        offsets = pool_offsets(table, start, end, kv_head, kv_heads, dim, block_size, tile)
        sums, peak, total = attend_tile(
            sums, peak, total, query, keys, values, offsets, last, start, end, scale, dim, padded, tile, False
        )
    for start in range(whole, end, tile):
        offsets = pool_offsets(table, start, end, kv_head, kv_heads, dim, block_size, tile)
        sums, peak, total = attend_tile(
            sums, peak, total, query, keys, values, offsets, last, start, end, scale, dim, padded, tile, True
        )
    return sums, peak, total


@triton.jit
def average(sums, total):
    """The values' weighted average; zeros over nothing."""
    return sums / tl.where(total > 0, total, 1.0)[:, None]


@triton.jit
def store_result(output, sums, total, row, head, keep, heads: tl.constexpr, dim: tl.constexpr, padded: tl.constexpr):
    """The average of each line of a tile into its row and head of the output."""
    at = ((row.to(tl.int64) * heads + head) * dim)[:, None] + tl.arange(0, padded)[None, :]
    tl.store(output + at, average(sums, total).to(output.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["rows", "sequences"])
def write_rows(
    key, key_row, key_head, value, value_row, value_head, keys, values, slots, query_starts, output, rows, sequences,
    group: tl.constexpr, kv_heads: tl.constexpr, dim: tl.constexpr, padded: tl.constexpr, tile: tl.constexpr,
):
    """Program (t, h): the keys and values of KV head h of `tile` rows into the pool, zeros where a row is padding."""
    first, kv_head = tl.program_id(0) * tile, tl.program_id(1)
    row, column = first + tl.arange(0, tile), tl.arange(0, padded)
    slot = tl.load(slots + row, mask=row < rows, other=-1)
    keep = (slot >= 0)[:, None] & (column < dim)[None, :]
    to = ((slot * kv_heads + kv_head) * dim)[:, None] + column[None, :]
    of_key = row.to(tl.int64)[:, None] * key_row + kv_head * key_head + column[None, :]
    of_value = row.to(tl.int64)[:, None] * value_row + kv_head * value_head + column[None, :]
    tl.store(keys + to, tl.load(key + of_key, mask=keep), mask=keep)
    tl.store(values + to, tl.load(value + of_value, mask=keep), mask=keep)
    padding = ((row >= tl.load(query_starts + sequences)) & (row < rows))[:, None] & (column < dim)[None, :]
    for member in range(group):
        head = kv_head * group + member
        at = ((row.to(tl.int64) * kv_heads * group + head) * dim)[:, None] + column[None, :]
        tl.store(output + at, tl.zeros([tile, padded], output.dtype.element_ty), mask=padding)


@triton.jit(do_not_specialize=["sequences"])
def attend_queries(
    query, query_row, query_head, keys, values, output, block_tables, table_row, query_starts, context_lengths, scale,
    sequences, padded_sequences: tl.constexpr, group: tl.constexpr, kv_heads: tl.constexpr, dim: tl.constexpr,
    padded: tl.constexpr, block_size: tl.constexpr, height: tl.constexpr, tile: tl.constexpr,
    skip_single: tl.constexpr,
):
    """Program (h, t): one tile of a sequence's queries, with all heads of KV head h, over the sequence's context.

    A tile holds height // group queries. Sequence s has the tiles from query_starts[s] // queries + s on, at least as
    many as it needs. The last tiles see the longest contexts, so they start first.
    """
    queries: tl.constexpr = height // group
    kv_head, tile_number = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)
    number = tl.arange(0, padded_sequences)
    first_tile = tl.load(query_starts + number, mask=number < sequences, other=0) // queries + number
    sequence = tl.sum(((first_tile <= tile_number) & (number < sequences)).to(tl.int32), 0) - 1
    start = tl.load(query_starts + sequence)
    count = tl.load(query_starts + sequence + 1) - start
    context = tl.load(context_lengths + sequence)
    first = (tile_number - start // queries - sequence) * queries
    if first >= count or (skip_single and count == 1):
        return
    line, column = tl.arange(0, height), tl.arange(0, padded)
    own, head = first + line // group, kv_head * group + line % group
    keep = ((line < queries * group) & (own < count))[:, None] & (column < dim)[None, :]
    row = (start + own).to(tl.int64)
    block = tl.load(query + (row * query_row + head * query_head)[:, None] + column[None, :], mask=keep, other=0.0)
    last = context - count + own
    end = tl.minimum(context - count + first + queries, context)
    whole = tl.maximum(context - count + first + 1, 0) // tile * tile
    sums, total = tl.zeros([height, padded], tl.float32), tl.zeros([height], tl.float32)
    peak = tl.full([height], LOWEST, tl.float32)
    table = block_tables + sequence.to(tl.int64) * table_row
    sums, _, total = attend_span(
        sums, peak, total, block, keys, values, table, last, 0, whole, end, kv_head, scale, kv_heads, dim, padded,
        block_size, tile,
    )
    store_result(output, sums, total, row, head, keep, kv_heads * group, dim, padded)
