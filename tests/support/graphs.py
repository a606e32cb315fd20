"""Stages that run as on a GPU, on a CPU: paged steps padded to sizes, and graphs that are calls over the same slots.

Everything about graphs but the capture itself is then what a GPU runs: slots, refreshes, padding, copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface

from deepstack_serving.attention import ATTENTION, PagedLayer, packed_attention
from deepstack_serving.execution.recorder import CallRecorder
from deepstack_serving.stages.language import LanguageStage
from tests.support.local import LocalServer

SIZES = {"decode_batch_sizes": "1,2,4", "prefill_graph_tokens": "8,16,32,64,128"}


@contextmanager
def paged_attention_on_cpu() -> Iterator[None]:
    """For as long as it lasts, layers attend to a PagedLayer by plain SDPA."""
    AttentionInterface.register(ATTENTION, _attention)
    try:
        yield
    finally:
        AttentionInterface.register(ATTENTION, packed_attention)


def capture(server: LocalServer) -> LocalServer:
    """Every language stage of the server replays what it can."""
    for stage in server.port.language.values():
        stage.capture(CallRecorder())
    return server


def pad(server: LocalServer) -> LocalServer:
    """Every language stage runs eagerly, padded to the same sizes."""
    for stage in server.port.language.values():
        stage.runs_paged = True
    return server


def replays(stage: LanguageStage) -> int:
    return stage.runner.captured


def _attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **options: Any
) -> Any:
    layer = options["packed"]
    if not isinstance(layer, PagedLayer):
        return packed_attention(module, query, key, value, *rest, **options)
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    written = layer.slots >= 0
    layer.keys.flatten(0, 1)[layer.slots[written]] = key[written]
    layer.values.flatten(0, 1)[layer.slots[written]] = value[written]
    output = torch.zeros_like(query)
    for sequence, context in enumerate(layer.context_lengths.tolist()):
        if context:
            start, end = layer.query_starts[sequence : sequence + 2].tolist()
            blocks = layer.block_tables[sequence, : -(-context // layer.keys.shape[1])].long()
            output[start:end] = _attend(query[start:end], layer, blocks, context, options["scaling"])
    return output[None], None


def _attend(query: torch.Tensor, layer: PagedLayer, blocks: torch.Tensor, context: int, scale: float) -> torch.Tensor:
    keys, values = (pool[blocks].flatten(0, 1)[:context].transpose(0, 1) for pool in (layer.keys, layer.values))
    mask = torch.ones(len(query), context, dtype=torch.bool).tril(context - len(query))
    rows = functional.scaled_dot_product_attention(
        query.transpose(0, 1), keys, values, attn_mask=mask, scale=scale, enable_gqa=True
    )
    return rows.transpose(0, 1)
