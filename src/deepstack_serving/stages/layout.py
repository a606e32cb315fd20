"""Lay a checked call out for attention: which rows and blocks belong to which sequence, and where new keys go."""

from __future__ import annotations

import torch

from deepstack_serving.attention import PackedSequence, PackedStep
from deepstack_serving.execution.rows import StepRows
from deepstack_serving.kv_pool import KVPool
from deepstack_serving.stages.call import LanguageCall


def packed_step(call: LanguageCall, pool: KVPool, device: str) -> PackedStep:
    """The layout of one call; a stateless call has no pool."""
    sequences, slots, start = [], [], 0
    for index, (query, context) in enumerate(zip(call.query_lengths, call.context_lengths, strict=True)):
        end = start + query
        if call.block_tables is None:
            sequences.append(PackedSequence(start, end, context))
        else:
            blocks = call.block_tables[index, : -(-context // pool.block_size)].long()
            slots.append(_slots(blocks, context - query, context, pool.block_size))
            sequences.append(_on_blocks(start, end, context, blocks, device))
        start = end
    if call.block_tables is None:
        return PackedStep(tuple(sequences))
    return PackedStep(tuple(sequences), pool, torch.cat(slots).to(device))


def step_rows(call: LanguageCall, block_tables: torch.Tensor, block_size: int) -> StepRows:
    """The rows of a call with block tables, for the runner of a GPU."""
    queries = torch.tensor(call.query_lengths)
    contexts = torch.tensor(call.context_lengths)
    ends = queries.cumsum(0)
    sequence = torch.arange(len(queries)).repeat_interleave(queries)
    token = (contexts - ends)[sequence] + torch.arange(len(sequence))
    blocks = block_tables[sequence, token // block_size].long()
    starts = torch.zeros(len(queries) + 1, dtype=torch.int32)
    starts[1:] = ends
    return StepRows(
        position_ids=call.tensors["position_ids"].T.contiguous(),
        slots=blocks * block_size + token % block_size,
        block_tables=block_tables,
        query_starts=starts,
        context_lengths=contexts.int(),
        max_query_length=max(call.query_lengths, default=0),
    )


def _slots(blocks: torch.Tensor, first: int, end: int, block_size: int) -> torch.Tensor:
    """Pool slots of the tokens [first, end) of a sequence."""
    tokens = torch.arange(first, end)
    return blocks[tokens // block_size] * block_size + tokens % block_size


def _on_blocks(start: int, end: int, context: int, blocks: torch.Tensor, device: str) -> PackedSequence:
    first = int(blocks[0])
    if int(blocks[-1]) - first == len(blocks) - 1 and bool((blocks.diff() == 1).all()):
        return PackedSequence(start, end, context, first)
    return PackedSequence(start, end, context, blocks.to(device))
