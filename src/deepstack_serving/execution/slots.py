"""The static inputs of captured graphs: named slots in one registry, refreshed by one rule.

Absent or empty clears the slot. A tensor that fits is copied in, and what an earlier one left behind it is cleared.
Anything else raises, before any slot of the refresh is written: a replay never runs on half-new inputs, and what does
not fit never becomes zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeGuard

import torch

from deepstack_serving.errors import StageError


@dataclass(frozen=True)
class SlotSpec:
    """One slot: the largest `shape`, of which the `free` dimensions may be shorter, and what fills the rest.

    `source` is where its tensors come from, cpu or the stage's device; host tensors cross by a pinned copy, which is
    left out where a `constant` slot (one that no graph writes to) holds the same already.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    source: str
    free: tuple[int, ...] = (0,)
    empty: int = 0
    constant: bool = False


@dataclass(frozen=True)
class Scattered:
    """`extent` rows that are empty but for `rows`: row rows[i] is values[sources[i]]. As a slot's value it takes no
    memory beside the slot. Whoever makes it has checked both row tensors.
    """

    values: torch.Tensor
    rows: torch.Tensor
    sources: torch.Tensor
    extent: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.extent, *self.values.shape[1:])


Value = torch.Tensor | Scattered | None


class Slot:
    """One static input. Its buffer keeps its address for as long as the graphs live."""

    def __init__(self, spec: SlotSpec, device: str) -> None:
        self.spec = spec
        self.buffer = torch.full(spec.shape, spec.empty, dtype=spec.dtype, device=device)
        crosses = spec.source == "cpu" and device != "cpu"
        self._staging = torch.full(spec.shape, spec.empty, dtype=spec.dtype, pin_memory=True) if crosses else None
        self._extent = (0,) * len(spec.shape)

    def check(self, value: Value) -> None:
        """Raises StageError for a tensor that does not fit."""
        if not _is_filled(value):
            return
        spec, tensor = self.spec, value.values if isinstance(value, Scattered) else value
        fits = len(value.shape) == len(spec.shape) and all(
            size <= largest if dimension in spec.free else size == largest
            for dimension, (size, largest) in enumerate(zip(value.shape, spec.shape, strict=True))
        )
        if not fits or tensor.dtype != spec.dtype or str(tensor.device) != spec.source:
            raise StageError(
                f"slot {spec.name!r} takes {spec.dtype} up to {list(spec.shape)} on {spec.source}; "
                f"got {tensor.dtype} {list(value.shape)} on {tensor.device}"
            )

    def write(self, value: Value) -> None:
        """Copy a checked tensor in and clear what an earlier one left."""
        extent = tuple(value.shape) if _is_filled(value) else (0,) * len(self.spec.shape)
        target = self.buffer if self._staging is None else self._staging
        if self.spec.constant and extent == self._extent and _holds(target, value):
            return
        touched = tuple(map(max, extent, self._extent))
        if isinstance(value, Scattered):
            target[: touched[0]].fill_(self.spec.empty)
            target.index_copy_(0, value.rows, value.values.index_select(0, value.sources))
        else:
            self._clear(target, extent, touched)
            if value is not None and value.numel():
                target[_corner(extent)].copy_(value)
        if self._staging is not None and touched[0]:
            self.buffer[: touched[0]].copy_(self._staging[: touched[0]], non_blocking=True)
        self._extent = extent

    def _clear(self, target: torch.Tensor, extent: tuple[int, ...], touched: tuple[int, ...]) -> None:
        for dimension, (kept, end) in enumerate(zip(extent, touched, strict=True)):
            if kept < end:
                rest = [slice(0, size) for size in touched]
                rest[dimension] = slice(kept, end)
                target[tuple(rest)].fill_(self.spec.empty)


class SlotRegistry:
    """All slots of a stage."""

    def __init__(self, specs: Iterable[SlotSpec], device: str) -> None:
        self._slots = {spec.name: Slot(spec, device) for spec in specs}

    def refresh(self, values: Mapping[str, Value]) -> None:
        """Refresh every slot; those that `values` does not name are cleared. Raises StageError before any write."""
        unknown = [name for name in values if name not in self._slots]
        if unknown:
            raise StageError(f"there is no slot {unknown[0]!r}; there are {', '.join(self._slots)}")
        for name, slot in self._slots.items():
            slot.check(values.get(name))
        for name, slot in self._slots.items():
            slot.write(values.get(name))

    def replace(self, name: str, value: torch.Tensor | None) -> None:
        """Refresh one slot by the same rule, and leave the others."""
        self._slots[name].check(value)
        self._slots[name].write(value)

    def buffer(self, name: str) -> torch.Tensor:
        """The whole static buffer of a slot."""
        return self._slots[name].buffer

    @property
    def bytes(self) -> int:
        """Device memory of all slots."""
        return sum(slot.buffer.nbytes for slot in self._slots.values())

    def __contains__(self, name: object) -> bool:
        return name in self._slots


def _is_filled(value: Value) -> TypeGuard[torch.Tensor | Scattered]:
    return value is not None and 0 not in value.shape


def _holds(buffer: torch.Tensor, value: Value) -> bool:
    if isinstance(value, Scattered):
        return False
    return value is None or value.numel() == 0 or torch.equal(buffer[_corner(tuple(value.shape))], value)


def _corner(extent: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(0, size) for size in extent)
