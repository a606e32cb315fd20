"""From one decode step to the next within a graph: the same sequences, each one token further."""

from __future__ import annotations

from collections.abc import Callable

import torch

Advance = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int], None]
ADVANCED = ("position_ids", "slots", "block_tables", "context_lengths")


def advance(
    position_ids: torch.Tensor, slots: torch.Tensor, tables: torch.Tensor, contexts: torch.Tensor, block_size: int
) -> None:
    """Move the layout of a decode step one token further, in place; sequences of padding stay what they are."""
    runs = contexts > 0
    position_ids.add_(runs[:, None])
    contexts.add_(runs)
    token = (contexts - 1).clamp_min(0).long()
    column = (token // block_size).clamp_max(tables.shape[1] - 1)
    further = tables.gather(1, column[:, None])[:, 0].long() * block_size + token % block_size
    slots.copy_(torch.where(runs, further, -1))
