"""The rows of one paged step as host tensors, and the same padded to a bucket."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class StepRows:
    """position_ids [rows, axes], slots [rows] int64 (-1: nothing is written), block_tables [sequences, columns] int32,
    query_starts [sequences + 1] and context_lengths [sequences] int32 (0: no sequence); all on the host.
    """

    position_ids: torch.Tensor
    slots: torch.Tensor
    block_tables: torch.Tensor
    query_starts: torch.Tensor
    context_lengths: torch.Tensor
    max_query_length: int

    @property
    def rows(self) -> int:
        return len(self.slots)

    @property
    def sequences(self) -> int:
        return len(self.context_lengths)

    def tensors(self) -> dict[str, torch.Tensor]:
        """By the names of their slots."""
        return {name: getattr(self, name) for name in NAMES}

    def padded(self, rows: int, sequences: int, columns: int, max_query_length: int) -> StepRows:
        """With rows that write nothing and sequences that own no row behind the real ones."""
        tables = torch.zeros(sequences, columns, dtype=torch.int32)
        tables[: self.sequences, : self.block_tables.shape[1]] = self.block_tables
        return replace(
            self.with_sequences(sequences),
            position_ids=_pad(self.position_ids, rows - self.rows, 0),
            slots=_pad(self.slots, rows - self.rows, -1),
            block_tables=tables,
            context_lengths=_pad(self.context_lengths, sequences - self.sequences, 0),
            max_query_length=max_query_length,
        )

    def with_sequences(self, sequences: int) -> StepRows:
        """With the starts of sequences that own no row: what clearing a slot's tail would not give."""
        return replace(self, query_starts=_pad(self.query_starts, sequences - self.sequences, self.rows))


NAMES = ("position_ids", "slots", "block_tables", "query_starts", "context_lengths")


def _pad(tensor: torch.Tensor, more: int, value: int) -> torch.Tensor:
    """`more` entries of `value` behind the first dimension."""
    if more == 0:
        return tensor
    return torch.cat([tensor, tensor.new_full((more, *tensor.shape[1:]), value)])
