"""What can attend over pages besides this project's kernels: each made for a step's inputs, as a call per layer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional

from bench.attention_work import BLOCK_SIZE, DIM, HEADS, KV_HEADS, SCALE, Inputs
from deepstack_serving.attention import PagedLayer, paged_attention

Attend = Callable[[PagedLayer], torch.Tensor]


def paged(inputs: Inputs) -> Attend:
    """This project's operator."""
    return lambda layer: paged_attention(inputs.query, inputs.key, inputs.value, layer, SCALE)


def varlen_blocks(inputs: Inputs) -> Attend:
    """PyTorch's varlen_attn over the pages themselves, where this version can."""
    return _varlen(inputs, pages=True)


def varlen_gathered(inputs: Inputs) -> Attend:
    """varlen_attn over keys and values that index_select laid out one after another."""
    return _varlen(inputs, pages=False)


def _varlen(inputs: Inputs, pages: bool) -> Attend:
    from torch.nn.attention import varlen

    attention: Callable[..., Any] = varlen.varlen_attn  # its arguments changed from version to version
    known = inspect.signature(attention).parameters
    if pages and "block_table" not in known:
        raise NotImplementedError(f"varlen_attn of PyTorch {torch.__version__} takes no block table")
    layout, places = inputs.layers[0], _places(inputs)
    starts = functional.pad(layout.context_lengths.cumsum(0), (1, 0)).to(torch.int32)
    options: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    options |= {"enable_gqa": True} if "enable_gqa" in known else {}
    bounds = (max(inputs.work.queries), inputs.longest)

    def over_pages(layer: PagedLayer) -> Any:
        inputs.write(layer)
        own = {"block_table": layer.block_tables, "seqused_k": layer.context_lengths, **options}
        return attention(inputs.query, layer.keys, layer.values, layer.query_starts, None, *bounds, **own)

    def over_gathered(layer: PagedLayer) -> Any:
        inputs.write(layer)
        keys, values = (pool.flatten(0, 1).index_select(0, places) for pool in (layer.keys, layer.values))
        if "enable_gqa" not in known:
            keys, values = (tensor.repeat_interleave(HEADS // KV_HEADS, 1) for tensor in (keys, values))
        return attention(inputs.query, keys, values, layer.query_starts, starts, *bounds, **options)

    return over_pages if pages else over_gathered


def _places(inputs: Inputs) -> torch.Tensor:
    """Where the tokens of all contexts lie in the pool, sequence by sequence."""
    tables = inputs.layers[0].block_tables.long()
    slots = (tables[:, :, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device=tables.device)).flatten(1)
    return torch.cat([slots[number, :context] for number, context in enumerate(inputs.work.contexts)])


def sdpa_padded(inputs: Inputs) -> Attend:
    """scaled_dot_product_attention over a cache gathered into [sequences, longest context], masked."""
    work, layout = inputs.work, inputs.layers[0]
    if not work.is_decode and inputs.sequences > 1:
        raise NotImplementedError("queries of several lengths do not make a padded batch")
    index = layout.block_tables.flatten().long()
    width = layout.block_tables.shape[1] * BLOCK_SIZE
    queries, position = work.queries[0], torch.arange(width, device=index.device)
    last = layout.context_lengths[:, None] - queries + torch.arange(queries, device=index.device)
    mask: dict[str, Any] = {"attn_mask": (position <= last[:, :, None])[:, None]}
    if work.queries == work.contexts:  # then it needs no mask, and takes a faster kernel
        width, mask = inputs.longest, {"is_causal": True}

    def attend(layer: PagedLayer) -> torch.Tensor:
        inputs.write(layer)
        keys, values = (
            pool.index_select(0, index).view(inputs.sequences, -1, KV_HEADS, DIM)[:, :width].transpose(1, 2)
            for pool in (layer.keys, layer.values)
        )
        query = inputs.query.view(inputs.sequences, queries, HEADS, -1).transpose(1, 2)
        result = functional.scaled_dot_product_attention(query, keys, values, scale=SCALE, enable_gqa=True, **mask)
        return result.transpose(1, 2).flatten(0, 1)

    return attend


def flex_pages(inputs: Inputs) -> Attend:
    """FlexAttention over the pool as it lies; its mask turns a physical slot into a sequence's position."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    work, layout = inputs.work, inputs.layers[0]
    device, slots = layout.slots.device, layout.keys.shape[0] * BLOCK_SIZE
    counts = torch.tensor(work.contexts, device=device)
    owner, position = (torch.full((slots,), -1, device=device) for _ in range(2))
    owner[_places(inputs)] = torch.arange(len(counts), device=device).repeat_interleave(counts)
    position[_places(inputs)] = torch.cat([torch.arange(context, device=device) for context in work.contexts])
    asked = torch.tensor(work.queries, device=device)
    row_owner = torch.arange(len(asked), device=device).repeat_interleave(asked)
    row_position = position[layout.slots]

    def sees(_batch: Any, _head: Any, row: Any, slot: Any) -> Any:
        return (owner[slot] == row_owner[row]) & (position[slot] <= row_position[row])

    mask = create_block_mask(sees, None, None, work.rows, slots, device="cuda")
    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=False)

    def attend(layer: PagedLayer) -> torch.Tensor:
        inputs.write(layer)
        keys, values = (pool.flatten(0, 1).transpose(0, 1)[None] for pool in (layer.keys, layer.values))
        query = inputs.query.transpose(0, 1)[None]
        result: torch.Tensor = compiled(query, keys, values, block_mask=mask, scale=SCALE, enable_gqa=True)
        return result[0].transpose(0, 1)

    return attend


ARMS: Mapping[str, Callable[[Inputs], Attend]] = {
    "paged": paged,
    "varlen, block tables": varlen_blocks,
    "varlen, gathered": varlen_gathered,
    "SDPA, padded": sdpa_padded,
    "flex, physical pages": flex_pages,
}
