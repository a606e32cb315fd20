"""One training step's losses and gradients; on a GPU replayed from a CUDA graph, one graph per set of shapes.

A step of this model is thousands of small kernels, and starting them from Python takes five times longer than running
them. Gradients live in tensors that outlast every graph, so the optimiser and the clipping stay outside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from demo.batches import map_tensors


@dataclass(frozen=True)
class _Recording:
    staged: tuple[Tensor, ...]
    inputs: tuple[Tensor, ...]
    copied: torch.cuda.Event
    graph: torch.cuda.CUDAGraph
    losses: Tensor


class StepRunner:
    """Call it with a CPU batch: gradients are in the parameters afterwards, the losses [2] are returned."""

    def __init__(self, compute: Callable[[Any], Tensor], weights: Tensor, parameters: Sequence[Tensor]) -> None:
        self._compute, self._weights, self._device = compute, weights, weights.device
        self._gradients = [torch.zeros_like(parameter) for parameter in parameters]
        for parameter, gradient in zip(parameters, self._gradients, strict=True):
            parameter.grad = gradient
        self._recordings: dict[tuple[torch.Size, ...], _Recording] = {}
        self._pool: Any = None

    def __call__(self, batch: tuple[Tensor, ...]) -> Tensor:
        if self._device.type == "cpu":
            return self._backward(batch)
        key = tuple(values.shape for values in batch)
        if key not in self._recordings:
            self._recordings[key] = self._record(batch)
        return self._replay(self._recordings[key], batch)

    def _backward(self, batch: tuple[Tensor, ...]) -> Tensor:
        torch._foreach_zero_(self._gradients)
        with torch.autocast(self._device.type, torch.bfloat16, self._device.type != "cpu", cache_enabled=False):
            losses = self._compute(batch)
        torch.autograd.backward(losses @ self._weights)
        return losses.detach()

    def _record(self, batch: tuple[Tensor, ...]) -> _Recording:
        """Run once on a side stream, so that libraries have set themselves up, and then record."""
        staged = map_tensors(batch, lambda values: torch.empty_like(values).pin_memory())
        inputs = map_tensors(batch, lambda values: values.to(self._device))
        cuda: Any = torch.cuda
        side = cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._backward(inputs)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            losses = self._backward(inputs)
        self._pool = graph.pool()
        return _Recording(staged, inputs, cuda.Event(), graph, losses)

    @staticmethod
    def _replay(recording: _Recording, batch: tuple[Tensor, ...]) -> Tensor:
        recording.copied.synchronize()
        for values, staged, target in zip(batch, recording.staged, recording.inputs, strict=True):
            staged.copy_(values)
            target.copy_(staged, non_blocking=True)
        recording.copied.record()
        recording.graph.replay()
        return recording.losses
