"""Attention over packed rows and the paged KV pool, plugged into transformers through its AttentionInterface.

The step's layout rides down the decoder layers as the keyword argument `packed`. Each sequence attends alone over
exactly its own context, so what other sequences or freed blocks hold cannot reach it. A PackedStep goes to SDPA here
and has no row of padding; a PagedLayer goes to the kernels of `paged`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface

from deepstack_serving.attention.paged import PagedLayer, paged_attention
from deepstack_serving.kv_pool import KVPool

ATTENTION = "deepstack_packed"
LayerTensors = tuple[torch.Tensor, ...]


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
    """The layout of one packed call. `slots` [rows] says where in the pool each row's keys and values go.

    `masks` and `views` are made once and shared by the layers of a step.
    """

    sequences: tuple[PackedSequence, ...]
    pool: KVPool | None = None
    slots: torch.Tensor | None = None
    masks: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    views: dict[int, tuple[LayerTensors, LayerTensors]] = field(default_factory=dict)

    def causal_mask(self, queries: int, context: int, device: torch.device) -> torch.Tensor:
        """[queries, context]: query i sees the context up to its own place."""
        mask = self.masks.get((queries, context))
        if mask is None:
            mask = torch.ones(queries, context, dtype=torch.bool, device=device).tril(context - queries)
            self.masks[queries, context] = mask
        return mask

    def context(self, pool: KVPool, item: PackedSequence, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A sequence's own keys and values in one layer, oldest first, each [1, kv heads, context, dim]."""
        if isinstance(item.blocks, torch.Tensor):
            keys, values = (
                tensor.index_select(0, item.blocks).flatten(0, 1)[: item.context_length].transpose(0, 1)[None]
                for tensor in pool.layer(layer)
            )
            return keys, values
        if item.start not in self.views:
            slots = slice(start := item.blocks * pool.block_size, start + item.context_length)
            of_keys, of_values = (
                tensor.flatten(1, 2)[:, slots].transpose(1, 2)[:, None].unbind(0) for tensor in (pool.keys, pool.values)
            )
            self.views[item.start] = of_keys, of_values
        of_keys, of_values = self.views[item.start]
        return of_keys[layer - pool.first_layer], of_values[layer - pool.first_layer]


def packed_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    *,
    packed: PackedStep | PagedLayer,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """query [1, heads, rows, dim], key and value [1, kv heads, rows, dim] -> ([1, rows, heads, dim], None)."""
    if isinstance(packed, PagedLayer):
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        rows, new_keys, new_values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        return paged_attention(rows, new_keys, new_values, packed, scale)[None], None
    if packed.pool is None or packed.slots is None:
        contexts = [(key[:, :, item.start : item.end], value[:, :, item.start : item.end]) for item in packed.sequences]
    else:
        for tensor, new in zip(packed.pool.layer(module.layer_idx), (key, value), strict=True):
            tensor.flatten(0, 1).index_copy_(0, packed.slots, new[0].transpose(0, 1))
        contexts = [packed.context(packed.pool, item, module.layer_idx) for item in packed.sequences]
    outputs = [
        _attend(query[0, :, item.start : item.end], *context, packed, scaling)
        for item, context in zip(packed.sequences, contexts, strict=True)
    ]
    return torch.cat(outputs, 1).transpose(0, 1)[None], None


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, packed: PackedStep, scaling: float | None
) -> torch.Tensor:
    """query [heads, queries, dim] over keys and values [1, kv heads, context, dim] -> [heads, queries, dim]."""
    heads, queries, dim = query.shape
    kv_heads, context = keys.shape[1], keys.shape[2]
    if queries == 1:  # the query heads of one KV head stand in for query rows: no mask, no repeated keys
        grouped = query.reshape(1, kv_heads, heads // kv_heads, dim)
        return functional.scaled_dot_product_attention(grouped, keys, values, scale=scaling).reshape(heads, 1, dim)
    mask = None if queries == context else packed.causal_mask(queries, context, query.device)
    return functional.scaled_dot_product_attention(
        query[None], keys, values, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=heads != kv_heads
    )[0]


AttentionInterface.register(ATTENTION, packed_attention)
