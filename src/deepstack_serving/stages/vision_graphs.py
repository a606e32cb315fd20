"""Runs the vision tower of a stage on a GPU: eagerly, or as the replay of a graph captured for the images' patches.

A graph serves one layout of patches (how many, in how many images) and is captured when that layout comes a second
time: sizes that come once are not worth one. The number of graphs and what they hold are bounded.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch

from deepstack_serving.errors import SettingsError
from deepstack_serving.execution.recorder import Recorder, Replay
from deepstack_serving.execution.slots import SlotRegistry, SlotSpec
from deepstack_serving.families.base import VisionFeatures
from deepstack_serving.families.vision_tower import CapturableTower, TowerCall
from deepstack_serving.settings import Settings
from deepstack_serving.wire import deepstack_name

Layout = tuple[int, ...]


@dataclass(frozen=True)
class GraphBounds:
    """`rows` of one graph, `total_rows` of all of them together (about 12 KB each in an 8B model), and their number."""

    rows: int = 16_384
    total_rows: int = 65_536
    graphs: int = 16
    remembered: int = 1024  # layouts that came once


@dataclass(frozen=True)
class _Captured:
    slots: SlotRegistry
    replay: Replay
    rows: int

    def __call__(self, call: TowerCall) -> dict[str, torch.Tensor]:
        self.slots.refresh(call.tensors)
        self.replay()
        return {name: tensor.clone() for name, tensor in self.replay.output.items()}


class TowerRunner:
    """Owns the graphs of one tower, for any number of threads: one of them at a time uses the device."""

    def __init__(self, tower: CapturableTower, settings: Settings, bounds: GraphBounds | None = None) -> None:
        self._tower, self._settings, self._bounds = tower, settings, bounds or GraphBounds()
        self._recorder: Recorder | None = None
        self._seen: OrderedDict[Layout, None] = OrderedDict()
        self._graphs: OrderedDict[Layout, _Captured] = OrderedDict()
        self._lock = Lock()
        self.is_compiled = settings.compile != "off" and tower.can_compile
        if self.is_compiled:
            self._compile()

    @property
    def captured(self) -> tuple[Layout, ...]:
        """The layouts that have a graph, the longest unused first."""
        return tuple(self._graphs)

    @property
    def captures(self) -> bool:
        """Whether layouts that come again get a graph."""
        return self._recorder is not None

    def run(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Features by their tensors' names, each [tokens, width], on the device; no later run changes them."""
        with self._lock:
            call = self._tower.arrange(inputs)
            graph = self._graph(call)
            return named(self._tower.run(call)) if graph is None else graph(call)

    def start(self, recorder: Recorder | None) -> None:
        """Run small images before the first request: compiles, and shows that graphs can be captured.

        Without a recorder everything runs eagerly. Raises SettingsError where compiling or capturing fails.
        """
        try:
            if self.is_compiled:
                self.run(self._tower.usual_example())  # the first: kernels are tuned for its size
            for inputs in self._tower.examples():
                self.run(inputs)
        except RuntimeError as error:
            if not self.is_compiled:
                raise
            raise SettingsError(
                f"setting 'compile': the vision tower cannot be compiled: {error}; set it to 'off'"
            ) from error
        self._recorder = recorder
        for _ in range(2 if recorder else 0):  # the second time captures
            for inputs in self._tower.examples():
                self.run(inputs)

    def _compile(self) -> None:
        from deepstack_serving.execution.compiled import AUTOTUNE, TUNED, prepare_compilations  # slow to import

        prepare_compilations(self._settings)
        options: Any = AUTOTUNE if self._settings.compile == "autotune" else TUNED
        self._tower.compile_blocks(
            lambda function: torch.compile(function, dynamic=True, fullgraph=True, options=options)
        )

    def _graph(self, call: TowerCall) -> _Captured | None:
        """The graph of a layout that came before, captured now if it is the second time."""
        if self._recorder is None or call.rows > self._bounds.rows:
            return None
        if call.layout in self._graphs:
            self._graphs.move_to_end(call.layout)
            return self._graphs[call.layout]
        if call.layout not in self._seen:
            self._seen[call.layout] = None
            if len(self._seen) > self._bounds.remembered:
                self._seen.popitem(last=False)
            return None
        return self._capture(call, self._recorder)

    def _capture(self, call: TowerCall, recorder: Recorder) -> _Captured | None:
        self._make_room(call.rows)
        device = str(next(iter(call.tensors.values())).device)
        specs = [
            SlotSpec(name, tuple(tensor.shape), tensor.dtype, str(tensor.device), free=())
            for name, tensor in call.tensors.items()
        ]
        try:
            slots = SlotRegistry(specs, device)
            slots.refresh(call.tensors)
            static = TowerCall({spec.name: slots.buffer(spec.name) for spec in specs}, call.layout)
            replay = recorder.record(lambda: named(self._tower.run(static)))
        except RuntimeError as error:
            refusal = SettingsError(
                f"setting 'execution': a vision tower run of {call.rows} patches cannot be captured: {error}; "
                "set it to 'eager', or 'graph_fallback' to true"
            )
            if not self._settings.graph_fallback:
                raise refusal from error
            logging.getLogger(__name__).warning("images run eagerly, as 'graph_fallback' allows: %s", refusal)
            self._recorder = None
            self._graphs.clear()
            return None
        self._graphs[call.layout] = _Captured(slots, replay, call.rows)
        return self._graphs[call.layout]

    def _make_room(self, rows: int) -> None:
        bounds = self._bounds
        while self._graphs and (
            len(self._graphs) >= bounds.graphs
            or rows + sum(graph.rows for graph in self._graphs.values()) > bounds.total_rows
        ):
            self._graphs.popitem(last=False)


def named(features: VisionFeatures) -> dict[str, torch.Tensor]:
    """Features by the names of the tensors that they leave in."""
    tensors = {deepstack_name(layer): tensor for layer, tensor in features.deepstack.items()}
    return tensors if features.image_embeds is None else {**tensors, "image_embeds": features.image_embeds}
