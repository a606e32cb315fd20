"""Record a function over static tensors once, and run it again without Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import torch


class Replay(Protocol):
    """Runs what was recorded, on what is in its static inputs now. `output` is static: the next replay rewrites it."""

    output: dict[str, torch.Tensor]

    def __call__(self) -> None: ...


class Recorder(Protocol):
    """Makes replays."""

    def record(self, function: Callable[[], dict[str, torch.Tensor]]) -> Replay:
        """`function` takes no arguments: it reads static buffers."""

    def cut(self) -> None:
        """To be called by the function between two parts: the device begins with one while the next is launched."""


class GraphReplay:
    """Captured CUDA graphs, one part of the function after the other."""

    def __init__(self, parts: Sequence[torch.cuda.CUDAGraph], output: dict[str, torch.Tensor]) -> None:
        self._parts, self.output = tuple(parts), output

    def __call__(self) -> None:
        for part in self._parts:
            part.replay()


class CudaRecorder:
    """Captures CUDA graphs that share one memory pool: they run one after another, and outputs leave as copies."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._parts: list[torch.cuda.CUDAGraph] = []
        self._capture: ExitStack | None = None

    def record(self, function: Callable[[], dict[str, torch.Tensor]]) -> Replay:
        with torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                function()  # compiles and picks kernels, which a capture does not allow
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # what warming up took: no other stream could use it
            self._parts.clear()
            self._begin()
            try:
                output = function()
            finally:
                self._end()
        return GraphReplay(self._parts, output)

    def cut(self) -> None:
        if self._capture is not None:
            self._end()
            self._begin()

    def _begin(self) -> None:
        graph, self._capture = torch.cuda.CUDAGraph(), ExitStack()
        # Other threads may go on using the device meanwhile: those that prepare images do.
        capture = torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")
        self._capture.enter_context(capture)
        self._parts.append(graph)

    def _end(self) -> None:
        capture, self._capture = self._capture, None
        if capture is not None:
            capture.close()


class CallReplay:
    """Calls the function again, into the same output tensors: what a graph does, on a device that has none."""

    def __init__(self, function: Callable[[], dict[str, torch.Tensor]]) -> None:
        self._function = function
        self.output = {name: tensor.clone() for name, tensor in function().items()}

    def __call__(self) -> None:
        for name, tensor in self._function().items():
            self.output[name].copy_(tensor)


class CallRecorder:
    """For tests of everything about graphs but the capture itself."""

    def record(self, function: Callable[[], dict[str, torch.Tensor]]) -> Replay:
        return CallReplay(function)

    def cut(self) -> None:
        pass
