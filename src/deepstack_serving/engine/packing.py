"""Build the packed tensors of one step from the sequences' state. Names and shapes are those of wire.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deepstack_serving.engine.ports import Array
from deepstack_serving.engine.scheduler import Work
from deepstack_serving.errors import StageError


@dataclass(frozen=True)
class PackedRows:
    """`layout` goes to every stage, `feature_layout` to stages that receive features (empty without image rows)."""

    input_ids: npt.NDArray[np.int64]
    layout: dict[str, Array]
    feature_layout: dict[str, Array]


def pack_rows(work: Sequence[Work], position_axes: int) -> PackedRows:
    """The rows of all work, in order."""
    tables = np.zeros((len(work), max(len(item.sequence.block_table) for item in work)), dtype=np.int32)
    for index, item in enumerate(work):
        tables[index, : len(item.sequence.block_table)] = item.sequence.block_table
    layout = {
        "position_ids": np.concatenate([_positions(item, position_axes) for item in work], axis=1),
        "query_lengths": np.array([item.end - item.start for item in work], dtype=np.int32),
        "context_lengths": np.array([item.end for item in work], dtype=np.int32),
        "block_tables": tables,
    }
    return PackedRows(np.concatenate([_ids(item) for item in work]), layout, _feature_layout(work))


def pack_sampling(work: Sequence[Work]) -> dict[str, Array]:
    """What the last stage needs beside the rows: which rows to sample, and how. All-greedy steps send no parameters."""
    ends = np.cumsum([item.end - item.start for item in work])
    sampled = [item for item in work if item.samples]
    tensors: dict[str, Array] = {"sample_rows": ends[[item.samples for item in work]].astype(np.int64) - 1}
    parameters = [item.sequence.request.sampling for item in sampled]
    count = max((item.logprobs for item in parameters), default=0)
    if count:
        tensors["top_count"] = np.array([count], dtype=np.int32)
    if any(not item.is_greedy for item in parameters):
        tensors["temperature"] = np.array([item.temperature for item in parameters], dtype=np.float32)
        tensors["top_k"] = np.array([item.top_k for item in parameters], dtype=np.int32)
        tensors["top_p"] = np.array([item.top_p for item in parameters], dtype=np.float32)
        tensors["min_p"] = np.array([item.min_p for item in parameters], dtype=np.float32)
        draws = [(item.sequence.request.sampling.seed, len(item.sequence.output_ids)) for item in sampled]
        tensors["seed"] = np.array(draws, dtype=np.int64)
    return tensors


def _ids(item: Work) -> npt.NDArray[np.int64]:
    sequence = item.sequence
    if sequence.in_prefill:
        return sequence.prompt.input_ids[item.start : item.end]
    return np.array([sequence.next_id], dtype=np.int64)


def _positions(item: Work, axes: int) -> npt.NDArray[np.int64]:
    positions = item.sequence.positions
    if positions is None:
        raise StageError("a sequence was scheduled before its positions were known")
    if item.sequence.in_prefill:
        return positions.prompt[:, item.start : item.end]
    return np.full((axes, 1), item.start + positions.delta, dtype=np.int64)


def _feature_layout(work: Sequence[Work]) -> dict[str, Array]:
    """Which packed rows are image tokens, and the row of each in the joined features."""
    rows, sources, row, offset = [], [], 0, 0
    for item in work:
        prompt, features = item.sequence.prompt, item.sequence.features
        if item.sequence.in_prefill and features is not None:
            first, end = np.searchsorted(prompt.image_rows, (item.start, item.end))
            if end > first:
                rows.append(prompt.image_rows[first:end] - item.start + row)
                sources.append(prompt.feature_rows[first:end] + offset)
                offset += features.rows
        row += item.end - item.start
    if not rows:
        return {}
    return {"image_rows": np.concatenate(rows), "feature_rows": np.concatenate(sources)}
