"""Vision modules that run without host work: what a family hands to a stage that captures them in CUDA graphs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from deepstack_serving.families.base import VisionFeatures

Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]  # torch.compile with its options


@dataclass(frozen=True)
class TowerCall:
    """One run: tensors on the tower's device, and the patches of each image or frame.

    Calls of one `layout` run the same kernels over tensors of the same shapes: a graph of one serves the others.
    """

    tensors: Mapping[str, torch.Tensor]
    layout: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Patches in all."""
        return sum(self.layout)


class CapturableTower(ABC):
    """The vision modules of a loaded stage in two steps: `arrange` on the host, then `run`, which a graph may hold."""

    @property
    @abstractmethod
    def can_compile(self) -> bool:
        """Whether one compilation of the blocks serves every layout."""

    @abstractmethod
    def arrange(self, inputs: Mapping[str, torch.Tensor]) -> TowerCall:
        """What an ImageProcessing or VideoProcessing prepared, on the tower's device, with all that its grids imply."""

    @abstractmethod
    def run(self, call: TowerCall) -> VisionFeatures:
        """Device work alone: no value of a tensor is read, and nothing outside `call` and the weights is used."""

    @abstractmethod
    def compile_blocks(self, compiler: Compiler) -> None:
        """Run the blocks through one compiled function from now on."""

    @abstractmethod
    def examples(self) -> Iterator[dict[str, torch.Tensor]]:
        """Small inputs of different layouts, to run once before the first request."""

    @abstractmethod
    def usual_example(self) -> dict[str, torch.Tensor]:
        """Inputs of the size of a usual image."""
