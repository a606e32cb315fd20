"""Runs the paged steps of a language stage on a GPU: eagerly, or as the replay of a graph captured for their size.

A decode step (one row per sequence) is padded to a number of sequences, a prefill step to a number of rows, in both
ways of running alike, so that they compute the same products. Where they differ is how inputs reach the layers: fresh
tensors and explicit rows here, slots there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from deepstack_serving.attention import PagedLayer
from deepstack_serving.errors import SettingsError, StageError
from deepstack_serving.execution.advance import ADVANCED, Advance, advance
from deepstack_serving.execution.buckets import Bucket, bucket_for, decode_bucket
from deepstack_serving.execution.features import StepFeatures
from deepstack_serving.execution.layers import DecoderLayers, Inject, LayerFunctions
from deepstack_serving.execution.recorder import Recorder, Replay
from deepstack_serving.execution.rows import NAMES, StepRows
from deepstack_serving.execution.slots import SlotRegistry, SlotSpec, Value
from deepstack_serving.kv_pool import KVPool
from deepstack_serving.wire import deepstack_name

CUTS = (1, 4)  # layers behind which a step's graph is cut: launching all of it takes as long as some layers do
Head = Callable[[torch.Tensor], dict[str, torch.Tensor]]
Embed = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Ends:
    """What stands before and behind the layers: `embed` takes token ids [rows] in the first stage, and `head` runs on
    the rows of decode steps in the last one, its sampling.
    """

    embed: Embed | None = None
    head: Head | None = None


@dataclass(frozen=True)
class CompiledStep:
    """The compiled parts of a stage's steps."""

    decode: LayerFunctions
    prefill: LayerFunctions
    head: Head | None
    advance: Advance


@dataclass(frozen=True)
class Sizes:
    """What steps are padded to; no sizes: they run as they are."""

    decode: tuple[int, ...] = ()  # sequences
    prefill: tuple[int, ...] = ()  # rows
    prefill_sequences: int = 1  # of a prefill step: prompts, and what decodes beside them
    columns: int = 1  # of the block tables


class StepRunner:
    """Owns the slots and graphs of one stage."""

    def __init__(
        self,
        layers: DecoderLayers,
        pool: KVPool,
        sizes: Sizes,
        ends: Ends,
        compiled: CompiledStep | None = None,
    ) -> None:
        self._layers, self._pool, self._sizes, self._embed = layers, pool, sizes, ends.embed
        self._decode = compiled.decode if compiled else None
        self._prefill = compiled.prefill if compiled else None
        self._head = compiled.head if compiled else ends.head
        self._advance = compiled.advance if compiled else advance
        self.device = str(pool.keys.device)
        self._replays: dict[Bucket, Replay] = {}
        self._last: tuple[Bucket, int] | None = None
        self._leaving = torch.empty(0)  # what prompt steps end with: each graph would keep one of its own
        self.continued = 0  # decode steps that needed no new layout
        self.slots = SlotRegistry((), self.device)

    @property
    def captured(self) -> int:
        """How many graphs there are."""
        return len(self._replays)

    @property
    def is_compiled(self) -> bool:
        """Whether its layers are compiled."""
        return self._decode is not None

    def run(
        self,
        entering: torch.Tensor,
        step: StepRows,
        features: StepFeatures | None,
        wanted: Collection[str],
        *,
        eager: bool = False,
    ) -> dict[str, torch.Tensor]:
        """Hidden states [rows, width] on the device, or token ids [rows] on the host, through the layers.

        Gives those of the `wanted` that the step has, each [rows, ...]: what the head makes of a decode step, else
        `hidden`. They may be views, which the next step rewrites.
        """
        self._last = None
        bucket = self._bucket(entering, step, features)
        if bucket is None:
            return self._eager(self._hidden(entering), step, features)
        if bucket in self._replays and not eager:
            self._refresh(bucket, entering, step, features)
            return self._replay(bucket, step.rows, wanted)
        padded = step.padded(bucket.rows, bucket.sequences, self._sizes.columns, bucket.max_query_length)
        rows = entering if bucket.is_decode else self._hidden(entering)
        rows = torch.cat([rows, rows.new_zeros(bucket.rows - len(rows), *rows.shape[1:])])
        return {name: tensor[: step.rows] for name, tensor in self._eager(self._hidden(rows), padded, features).items()}

    def finish(self, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
        """What the head makes of rows [rows, width] of a prefill step, padded as a decode step's are, so that what is
        compiled for those serves these.
        """
        if self._head is None:
            raise StageError("this stage has no head")
        size = bucket_for(self._sizes.decode, len(hidden)) or len(hidden)
        padded = torch.cat([hidden, hidden.new_zeros(size - len(hidden), hidden.shape[1])])
        return {name: tensor[: len(hidden)] for name, tensor in self._head(padded).items()}

    @property
    def can_continue(self) -> bool:
        """Whether the last step was a replayed decode step, which leaves its slots one token further."""
        return self._last is not None

    def entering(self, rows: int) -> torch.Tensor:
        """Where the rows of the step that `continue_decode` runs are to be put: as many as the last step had."""
        return self.slots.buffer(self._entering_slot)[:rows]

    def continue_decode(self, wanted: Collection[str]) -> dict[str, torch.Tensor]:
        """The next decode step of the same sequences, as `run` would do it, on what was put to `entering`."""
        if self._last is None:
            raise StageError("there is no replayed decode step to continue")
        self.continued += 1
        return self._replay(*self._last, wanted)

    def capture(self, recorder: Recorder) -> None:
        """Capture a graph for every size, the largest first. Raises SettingsError when that fails."""
        buckets = [decode_bucket(size) for size in self._sizes.decode]
        buckets += [self._prefill_bucket(size) for size in self._sizes.prefill]
        self.slots = SlotRegistry(self._specs(), self.device)
        self._leaving = torch.empty_like(self.slots.buffer("hidden")[: max(self._sizes.prefill, default=0)])
        for number, bucket in enumerate(sorted(buckets, key=lambda item: -item.rows)):
            started = time.monotonic()
            try:
                self._replays[bucket] = recorder.record(partial(self._captured, bucket, recorder.cut))
            except RuntimeError as error:
                self._replays.clear()
                raise SettingsError(
                    f"setting 'execution': a step of {bucket.rows} rows cannot be captured: {error}; "
                    "set it to 'eager', or 'graph_fallback' to true"
                ) from error
            logging.getLogger(__name__).info(
                "captured %s of %d rows (%d of %d) in %.1f s",
                "decode" if bucket.is_decode else "prefill",
                bucket.rows,
                number + 1,
                len(buckets),
                time.monotonic() - started,
            )

    def _bucket(self, entering: torch.Tensor, step: StepRows, features: StepFeatures | None) -> Bucket | None:
        has_images = self._embed is not None and entering.ndim > 1
        if step.max_query_length == 1 and features is None and not has_images:
            size = bucket_for(self._sizes.decode, step.sequences)
            return None if size is None else decode_bucket(size)
        size = bucket_for(self._sizes.prefill, step.rows)
        if size is None or step.sequences > self._sizes.prefill_sequences:
            return None
        return self._prefill_bucket(size)

    def _prefill_bucket(self, size: int) -> Bucket:
        return Bucket(size, self._sizes.prefill_sequences, max(size, 2))

    @property
    def _entering_slot(self) -> str:
        """Of decode steps."""
        return "hidden" if self._embed is None else "input_ids"

    def _hidden(self, entering: torch.Tensor) -> torch.Tensor:
        if self._embed is None or entering.ndim > 1:
            return entering
        return self._embed(entering.to(self.device, non_blocking=True))

    def _eager(self, hidden: torch.Tensor, step: StepRows, features: StepFeatures | None) -> dict[str, torch.Tensor]:
        layout = {name: tensor.to(self.device, non_blocking=True) for name, tensor in step.tensors().items()}
        is_decode = step.max_query_length == 1 and features is None
        functions = self._decode if is_decode else self._prefill
        inject = None if features is None else features.add
        return self._forward(hidden, layout, step.max_query_length, inject, functions, is_decode)

    def _forward(
        self,
        hidden: torch.Tensor,
        layout: Mapping[str, torch.Tensor],
        max_query_length: int,
        inject: Inject | None,
        functions: LayerFunctions | None,
        with_head: bool,
        after: Callable[[int], None] | None = None,
    ) -> dict[str, torch.Tensor]:
        def packed(layer: int) -> PagedLayer:
            keys, values = self._pool.layer(layer)
            return PagedLayer(
                keys, values, **{name: layout[name] for name in NAMES[1:]}, max_query_length=max_query_length
            )

        hidden = self._layers.run(hidden, layout["position_ids"].T, packed, inject, functions, after)
        return self._head(hidden) if with_head and self._head else {"hidden": hidden}

    def _captured(self, bucket: Bucket, cut: Callable[[], None]) -> dict[str, torch.Tensor]:
        """What a graph of this size computes, over the slots."""
        sequences = bucket.sequences
        ends = {"block_tables": sequences, "context_lengths": sequences, "query_starts": sequences + 1}

        def slot(name: str) -> torch.Tensor:
            return self.slots.buffer(name)[: ends.get(name, bucket.rows)]

        def inject(layer: int, hidden: torch.Tensor) -> torch.Tensor:
            return hidden + slot(deepstack_name(layer))

        def after(layers: int) -> None:
            if layers in CUTS and layers < self._layers.plan.end_layer - self._layers.plan.first_layer:
                cut()

        layout = {name: slot(name) for name in NAMES}
        output = self._forward(
            self._hidden(slot(self._entering_slot if bucket.is_decode else "hidden")),
            layout,
            bucket.max_query_length,
            None if bucket.is_decode else inject,
            self._decode if bucket.is_decode else self._prefill,
            bucket.is_decode,
            after,
        )
        if bucket.is_decode:
            position_ids, slots, tables, contexts = (layout[name] for name in ADVANCED)
            self._advance(position_ids, slots, tables, contexts, self._pool.block_size)
            return output
        return {"hidden": self._leaving[: bucket.rows].copy_(output["hidden"])}

    def _refresh(self, bucket: Bucket, entering: torch.Tensor, step: StepRows, features: StepFeatures | None) -> None:
        values: dict[str, Value] = dict(step.with_sequences(bucket.sequences).tensors())
        if bucket.is_decode:
            values[self._entering_slot] = entering
        else:
            values["hidden"] = self._hidden(entering)
        if features is not None:
            for layer in self._layers.plan.injected:
                values[deepstack_name(layer)] = features.scattered(layer, len(entering))
        self.slots.refresh(values)

    def _replay(self, bucket: Bucket, rows: int, wanted: Collection[str]) -> dict[str, torch.Tensor]:
        replay = self._replays[bucket]
        replay()
        self._last = (bucket, rows) if bucket.is_decode else None
        return {name: tensor[:rows] for name, tensor in replay.output.items() if name in wanted}

    def _specs(self) -> Sequence[SlotSpec]:
        """Deepstack slots only where prefill is captured, and only for the layers that this stage adds."""
        text: Any = self._layers.family.text_model(self._layers.model).config
        rows = max((*self._sizes.decode, *self._sizes.prefill), default=1)
        sequences = max((*self._sizes.decode, self._sizes.prefill_sequences), default=1)
        width, dtype, axes = text.hidden_size, self._pool.keys.dtype, self._layers.family.position_axes
        injected = self._layers.plan.injected if self._sizes.prefill else ()
        takes_ids = self._embed is not None and self._sizes.decode
        return (
            SlotSpec("hidden", (rows, width), dtype, self.device),
            SlotSpec("position_ids", (rows, axes), torch.int64, "cpu"),
            SlotSpec("slots", (rows,), torch.int64, "cpu", empty=-1),
            SlotSpec("block_tables", (sequences, self._sizes.columns), torch.int32, "cpu", free=(0, 1), constant=True),
            SlotSpec("query_starts", (sequences + 1,), torch.int32, "cpu"),
            SlotSpec("context_lengths", (sequences,), torch.int32, "cpu"),
            *([SlotSpec("input_ids", (max(self._sizes.decode),), torch.int64, "cpu")] if takes_ids else []),
            *(SlotSpec(deepstack_name(layer), (rows, width), dtype, self.device) for layer in injected),
        )
