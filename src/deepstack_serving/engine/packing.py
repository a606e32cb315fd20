"""Build the packed tensors of one step from the sequences' state. Names and shapes are those of wire.py.

What decoding sequences send alike in every step is kept as long as the same ones decode: no stage computes while the
engine packs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from deepstack_serving.engine.ports import Array
from deepstack_serving.engine.scheduler import Work
from deepstack_serving.engine.sequence import EncodedBatch
from deepstack_serving.engine.sequence import Sequence as Running
from deepstack_serving.errors import StageError
from deepstack_serving.families.base import Positions
from deepstack_serving.wire import EAGER

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PackedRows:
    """`layout` goes to every stage, `feature_layout` to stages that receive features (empty without image rows).

    `sampling` goes to the last stage: which rows to sample, and how. All-greedy steps send no parameters.
    """

    input_ids: Int64s
    layout: dict[str, Array]
    feature_layout: dict[str, Array] = field(default_factory=dict)
    sampling: dict[str, Array] = field(default_factory=dict)


class Packer:
    """Packs the steps of one group of sequences; its steps differ little from one to the next."""

    def __init__(self, position_axes: int) -> None:
        self._axes = position_axes
        self._decoding: _Decoding | None = None

    def pack(self, work: Sequence[Work]) -> PackedRows:
        """The rows of all work, in order; decoding sequences come first."""
        sequences = [item.sequence for item in work if item.decodes]
        if not sequences:
            return _pack_prompts(work, self._axes)
        if self._decoding is None or sequences != self._decoding.sequences:
            self._decoding = _Decoding(sequences, self._axes)
        decoded = self._decoding.pack([item.end for item in work[: len(sequences)]])
        if len(sequences) == len(work):
            return decoded
        return _joined(decoded, _pack_prompts(work[len(sequences) :], self._axes), work)


class _Decoding:
    """Decoding sequences, and of their tensors all that no step changes."""

    def __init__(self, sequences: list[Running], axes: int) -> None:
        self.sequences = sequences
        self._axes = axes
        self._positions = np.array([_positions(sequence).delta - 1 for sequence in sequences], dtype=np.int64)
        self._prompts = np.array([sequence.prompt.length for sequence in sequences], dtype=np.int64)
        self._layout: dict[str, Array] = {
            "query_lengths": np.ones(len(sequences), dtype=np.int32),
            "block_tables": _tables(sequences),
            **_eager(sequences),
        }
        self._sampling: dict[str, Array] = {
            "sample_rows": np.arange(len(sequences), dtype=np.int64),
            **_parameters(sequences),
        }

    def pack(self, contexts: list[int]) -> PackedRows:
        """The step that takes each sequence's last token in and comes to so many tokens of each."""
        ends = np.array(contexts, dtype=np.int64)
        positions = np.empty((self._axes, len(contexts)), dtype=np.int64)
        positions[:] = ends + self._positions
        layout: dict[str, Array] = {"position_ids": positions, "context_lengths": ends.astype(np.int32)}
        layout |= self._layout
        sampling = self._sampling
        if "seed" in sampling:
            sampling = {**sampling, "seed": np.stack([sampling["seed"][:, 0], ends - self._prompts], axis=1)}
        ids = np.array([sequence.output_ids[-1] for sequence in self.sequences], dtype=np.int64)
        return PackedRows(ids, layout, {}, sampling)


def _pack_prompts(work: Sequence[Work], axes: int) -> PackedRows:
    sequences = [item.sequence for item in work]
    lengths = [item.end - item.start for item in work]
    positions = [_positions(item.sequence).prompt[:, item.start : item.end] for item in work]
    layout: dict[str, Array] = {
        "position_ids": np.concatenate(positions, axis=1).reshape(axes, -1),
        "query_lengths": np.array(lengths, dtype=np.int32),
        "context_lengths": np.array([item.end for item in work], dtype=np.int32),
        "block_tables": _tables(sequences),
        **_eager(sequences),
    }
    ids = np.concatenate([item.sequence.prompt.input_ids[item.start : item.end] for item in work])
    return PackedRows(ids, layout, _feature_layout(work), _sampling(work, lengths))


def _joined(decoded: PackedRows, prompts: PackedRows, work: Sequence[Work]) -> PackedRows:
    """A step of decoding sequences and prompts."""
    parts = (decoded.layout, prompts.layout)
    columns = max(part["block_tables"].shape[1] for part in parts)
    tables = [np.pad(part["block_tables"], ((0, 0), (0, columns - part["block_tables"].shape[1]))) for part in parts]
    names = ("position_ids", "query_lengths", "context_lengths")
    layout: dict[str, Array] = {
        **{name: np.concatenate([part[name] for part in parts], axis=-1) for name in names},
        "block_tables": np.concatenate(tables),
        **_eager([item.sequence for item in work]),
    }
    features = dict(prompts.feature_layout)
    if features:
        features["image_rows"] = features["image_rows"] + len(decoded.input_ids)
    ids = np.concatenate([decoded.input_ids, prompts.input_ids])
    return PackedRows(ids, layout, features, _sampling(work, [item.end - item.start for item in work]))


def _sampling(work: Sequence[Work], lengths: Sequence[int]) -> dict[str, Array]:
    samples = [item.samples for item in work]
    rows = np.cumsum(lengths, dtype=np.int64)[samples] - 1
    return {"sample_rows": rows, **_parameters([item.sequence for item in work if item.samples])}


def _parameters(sequences: Sequence[Running]) -> dict[str, Array]:
    parameters = [sequence.request.sampling for sequence in sequences]
    tensors: dict[str, Array] = {}
    count = max((item.logprobs for item in parameters), default=0)
    if count:
        tensors["top_count"] = np.array([count], dtype=np.int32)
    if any(not item.is_greedy for item in parameters):
        tensors["temperature"] = np.array([item.temperature for item in parameters], dtype=np.float32)
        tensors["top_k"] = np.array([item.top_k for item in parameters], dtype=np.int32)
        tensors["top_p"] = np.array([item.top_p for item in parameters], dtype=np.float32)
        tensors["min_p"] = np.array([item.min_p for item in parameters], dtype=np.float32)
        draws = [(sequence.request.sampling.seed, len(sequence.output_ids)) for sequence in sequences]
        tensors["seed"] = np.array(draws, dtype=np.int64)
    return tensors


def _tables(sequences: Sequence[Running]) -> npt.NDArray[np.int32]:
    """[sequences, columns], zero behind a sequence's own blocks."""
    tables = [sequence.block_table for sequence in sequences]
    lengths = np.array([len(table) for table in tables])
    padded = np.zeros((len(tables), lengths.max()), dtype=np.int32)
    padded[np.arange(padded.shape[1]) < lengths[:, None]] = np.concatenate(tables)
    return padded


def _eager(sequences: Sequence[Running]) -> dict[str, Array]:
    return {EAGER.name: np.array([True])} if any(item.request.audit.eager for item in sequences) else {}


def _positions(sequence: Running) -> Positions:
    if sequence.positions is None:
        raise StageError("a sequence was scheduled before its positions were known")
    return sequence.positions


def _feature_layout(work: Sequence[Work]) -> dict[str, Array]:
    """Which packed rows are image tokens, and the row of each in the joined batches."""
    rows, sources, row = [], [], 0
    starts: dict[EncodedBatch, int] = {}
    joined = 0
    for item in work:
        prompt, features = item.sequence.prompt, item.sequence.features
        if features is not None:
            first, end = np.searchsorted(prompt.image_rows, (item.start, item.end))
            if end > first:
                if features.batch not in starts:
                    starts[features.batch] = joined
                    joined += features.batch.rows
                rows.append(prompt.image_rows[first:end] - item.start + row)
                sources.append(prompt.feature_rows[first:end] + features.first_row + starts[features.batch])
        row += item.end - item.start
    if not rows:
        return {}
    return {"image_rows": np.concatenate(rows), "feature_rows": np.concatenate(sources)}
