"""Attention over packed rows and the paged KV pool, plugged into transformers through its AttentionInterface.

The step's layout rides down the decoder layers as the keyword argument `packed`. Each sequence attends alone over
exactly its own context, so what other sequences or freed blocks hold cannot reach it, and no row is padding.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface

from deepstack_serving.kv_pool import KVPool

ATTENTION = "deepstack_packed"


@dataclass(frozen=True)
class PackedSequence:
    """One sequence's rows [start, end) of the packed call, and its blocks in the pool (none in a stateless call).

    Blocks that follow each other are given as the first one's number: their context is a view, not a gather.
    """

    start: int
    end: int
    context_length: int
    blocks: torch.Tensor | int = -1


@dataclass(frozen=True)
class PackedStep:
    """The layout of one packed call. `slots` [rows] says where in the pool each row's keys and values go."""

    sequences: tuple[PackedSequence, ...]
    pool: KVPool | None = None
    slots: torch.Tensor | None = None
    masks: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    def causal_mask(self, queries: int, context: int, device: torch.device) -> torch.Tensor:
        """[queries, context]: query i sees the context up to its own place; shared by the layers of a step."""
        mask = self.masks.get((queries, context))
        if mask is None:
            mask = torch.ones(queries, context, dtype=torch.bool, device=device).tril(context - queries)
            self.masks[queries, context] = mask
        return mask


def packed_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    *,
    packed: PackedStep,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """query [1, heads, rows, dim], key and value [1, kv heads, rows, dim] -> ([1, rows, heads, dim], None)."""
    new_keys, new_values = key[0].transpose(0, 1), value[0].transpose(0, 1)
    if packed.pool is None or packed.slots is None:
        contexts = [(new_keys[item.start : item.end], new_values[item.start : item.end]) for item in packed.sequences]
    else:
        keys, values = packed.pool.layer(module.layer_idx)
        keys.flatten(0, 1).index_copy_(0, packed.slots, new_keys)
        values.flatten(0, 1).index_copy_(0, packed.slots, new_values)
        contexts = [(_context(keys, item), _context(values, item)) for item in packed.sequences]
    outputs = [
        _attend(query[0, :, item.start : item.end], *context, packed, scaling)
        for item, context in zip(packed.sequences, contexts, strict=True)
    ]
    return torch.cat(outputs, 1).transpose(0, 1)[None], None


def _context(pool: torch.Tensor, item: PackedSequence) -> torch.Tensor:
    """The sequence's own keys or values, oldest first: [context, kv heads, dim]."""
    if isinstance(item.blocks, int):
        start = item.blocks * pool.shape[1]
        return pool.flatten(0, 1)[start : start + item.context_length]
    return pool.index_select(0, item.blocks).flatten(0, 1)[: item.context_length]


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, packed: PackedStep, scaling: float | None
) -> torch.Tensor:
    """query [heads, queries, dim] over keys and values [context, kv heads, dim] -> [heads, queries, dim]."""
    heads, queries, dim = query.shape
    context, kv_heads = keys.shape[0], keys.shape[1]
    keys, values = keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
    if queries == 1:  # the query heads of one KV head stand in for query rows: no mask, no repeated keys
        grouped = query.reshape(1, kv_heads, heads // kv_heads, dim)
        return functional.scaled_dot_product_attention(grouped, keys, values, scale=scaling).reshape(heads, 1, dim)
    mask = None if queries == context else packed.causal_mask(queries, context, query.device)
    return functional.scaled_dot_product_attention(
        query[None], keys, values, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=heads != kv_heads
    )[0]


AttentionInterface.register(ATTENTION, packed_attention)
