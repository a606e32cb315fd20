"""Attention over the paged pool for GPUs: one operator that writes a step's keys and values, then attends to them.

The layout is tensors alone, so a layer around it can be compiled and captured in a CUDA graph: a replay with other
block tables and lengths in the same tensors is another step. Its kernels need Triton, the language (not the server).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from deepstack_serving.errors import SettingsError


class PagedLayer(NamedTuple):
    """One layer's pool and the layout of the step; made inside compiled code, hence a NamedTuple.

    Sequence s owns the rows [query_starts[s], query_starts[s + 1]), and query i of its q queries sees the context
    positions up to context_lengths[s] - q + i. Rows beyond the last sequence are padding, and give zeros.
    """

    keys: torch.Tensor  # [blocks, block_size, kv_heads, head_dim], contiguous
    values: torch.Tensor  # as keys, in a storage of its own: compiled code copies both if they share one
    slots: torch.Tensor  # [rows] int64: block * block_size + offset of each row; -1: nothing is written
    block_tables: torch.Tensor  # [sequences, columns] int32; what lies beyond a context is never looked up
    query_starts: torch.Tensor  # [sequences + 1] int32, from 0 up
    context_lengths: torch.Tensor  # [sequences] int32, this step's tokens included; 0: padding, which gives zeros
    max_query_length: int  # no sequence has more queries; 1 is a decode step


def paged_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: PagedLayer, scale: float
) -> torch.Tensor:
    """query [rows, heads, dim], key and value [rows, kv_heads, dim] -> [rows, heads, dim], contiguous.

    Writes the keys and values into the layer's pool by its slots, then attends, causally. All in one dtype, float32,
    bfloat16 or float16, and on one device. No step waits for the device; same inputs in same shapes give same bits.
    """
    output: torch.Tensor = _paged_attention(query, key, value, *layer, scale)
    return output


@torch.library.custom_op("deepstack::paged_attention", mutates_args=("keys", "values"))
def _paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lengths: torch.Tensor,
    max_query_length: int,
    scale: float,
) -> torch.Tensor:
    try:
        from deepstack_serving.attention.paged_launch import attend
    except ModuleNotFoundError as error:
        text = "paged attention needs the Python package 'triton', which PyTorch for GPUs brings"
        raise SettingsError(text) from error
    layer = PagedLayer(keys, values, slots, block_tables, query_starts, context_lengths, max_query_length)
    return attend(query, key, value, layer, scale)


@_paged_attention.register_fake
def _shape_only(query: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty(query.shape, dtype=query.dtype, device=query.device)
