"""The tiles and splits that a step of paged attention gets, and its launches. All of it follows from static shapes."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from math import e, log2

import torch
import triton

from deepstack_serving.attention.paged import PagedLayer
from deepstack_serving.attention.paged_kernels import attend_queries, write_rows
from deepstack_serving.attention.paged_splits import attend_splits, merge_splits
from deepstack_serving.errors import DeepstackError

_WRITTEN_ROWS = 16  # per program
_SMALLEST_DOT = 16
_PROGRAMS_PER_MULTIPROCESSOR = 2
_MOST_SPLITS = 128
_MULTIPROCESSORS_OF_THE_INTERPRETER = 16


@dataclass(frozen=True)
class Tiles:
    """The size of a program's work: lines of queries (queries x heads of one KV head) and context positions a turn.

    As a tile's address is looked up first, half of the stages go to that: 5 keep two tiles on their way, 3 one.
    """

    lines: int
    context: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Shape:
    """The static shape of a call."""

    rows: int
    sequences: int
    heads: int
    kv_heads: int
    dim: int
    block_size: int
    longest_context: int
    bytes_per_element: int
    multiprocessors: int
    starts_early: bool  # kernels may start while the one before them ends: compute capability 9.0

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.heads // self.kv_heads

    @property
    def padded_dim(self) -> int:
        return max(_SMALLEST_DOT, int(triton.next_power_of_2(self.dim)))

    @property
    def bytes_per_position(self) -> int:
        """Of one head's key, or value, in a tile."""
        return self.padded_dim * self.bytes_per_element

    def query_tiles(self, lines: int) -> int:
        """No fewer than the sequences' tiles, however the rows are shared out among them."""
        return self.rows // (lines // self.group) + self.sequences


def shape_of(query: torch.Tensor, layer: PagedLayer) -> Shape:
    """The shape of a call, by its tensors."""
    rows, heads, dim = query.shape
    _, block_size, kv_heads, _ = layer.keys.shape
    sequences, columns = layer.block_tables.shape
    return Shape(
        rows, sequences, heads, kv_heads, dim, block_size, columns * block_size, query.element_size(),
        _multiprocessors(query.device), starts_early(query.device),
    )  # fmt: skip


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return _MULTIPROCESSORS_OF_THE_INTERPRETER
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def starts_early(device: torch.device) -> bool:
    """Whether the device has programmatic dependent launches."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def tiles_of_queries(shape: Shape) -> Tiles:
    """For `attend_queries`: half as high where there would be fewer programs than multiprocessors."""
    smallest = max(_SMALLEST_DOT, triton.next_power_of_2(shape.group))
    if shape.bytes_per_element == 4:  # without tensor cores: what fits in registers
        return Tiles(max(32, smallest), 16, 8, 2)
    if shape.padded_dim > 128:
        return Tiles(max(64, smallest), 32, 4, 5)
    few = shape.query_tiles(max(128, smallest)) * shape.kv_heads < shape.multiprocessors
    return Tiles(max(64, smallest), 64, 4, 5) if few else Tiles(max(128, smallest), 64, 8, 5)


def tiles_of_splits(shape: Shape) -> Tiles:
    """For `attend_splits`: what keeps enough memory in flight."""
    lines = max(_SMALLEST_DOT, triton.next_power_of_2(shape.group))
    return Tiles(lines, max(16, min(64, 2**14 // shape.bytes_per_position)), 4, 5)


def splits_of(shape: Shape, tiles: Tiles) -> int:
    """The power of two that fills the GPU with programs, with a tile or more for each split of the longest context."""
    wanted = shape.multiprocessors * _PROGRAMS_PER_MULTIPROCESSOR // (shape.sequences * shape.kv_heads)
    most = min(wanted, -(-shape.longest_context // tiles.context), _MOST_SPLITS)
    return 1 << max(most, 1).bit_length() - 1


@dataclass(frozen=True)
class Step:
    """One call of paged attention: its tensors, and the launches over them."""

    query: torch.Tensor  # [rows, heads, dim]; of these three, each head's elements lie together
    key: torch.Tensor  # [rows, kv_heads, dim]
    value: torch.Tensor
    layer: PagedLayer
    output: torch.Tensor  # as query, contiguous
    scale: float
    shape: Shape

    def write(self) -> None:
        """The new keys and values into the pool, and zeros into the output's rows of padding."""
        shape, layer = self.shape, self.layer
        write_rows[triton.cdiv(shape.rows, _WRITTEN_ROWS), shape.kv_heads](
            self.key, *self.key.stride()[:2], self.value, *self.value.stride()[:2], layer.keys, layer.values,
            layer.slots, layer.query_starts, self.output, shape.rows, shape.sequences, shape.group, shape.kv_heads,
            shape.dim, shape.padded_dim, _WRITTEN_ROWS,
        )  # fmt: skip

    def attend_by_queries(self, tiles: Tiles, skip_single: bool) -> None:
        """All sequences, but those of one query if `skip_single`. The pool has the step's keys and values."""
        shape, layer = self.shape, self.layer
        attend_queries[shape.kv_heads, shape.query_tiles(tiles.lines)](
            self.query, *self.query.stride()[:2], layer.keys, layer.values, self.output, layer.block_tables,
            layer.block_tables.stride(0), layer.query_starts, layer.context_lengths, self.scale * log2(e),
            shape.sequences, triton.next_power_of_2(shape.sequences), shape.group, shape.kv_heads, shape.dim,
            shape.padded_dim, shape.block_size, tiles.lines, tiles.context, skip_single,
            num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip

    def attend_by_splits(self, tiles: Tiles, splits: int, writes: bool) -> None:
        """The sequences of one query; with `writes`, also what `write` does. More than one split takes a merge."""
        shape, layer, direct = self.shape, self.layer, splits == 1
        parts, weights = self._room_for_parts(splits)
        programs = max(shape.rows, shape.sequences) if writes else shape.sequences
        attend_splits[programs, shape.kv_heads, splits](
            self.query, *self.query.stride()[:2], self.key, *self.key.stride()[:2], self.value,
            *self.value.stride()[:2], layer.keys, layer.values, layer.slots, self.output, parts, weights,
            layer.block_tables, layer.block_tables.stride(0), layer.query_starts, layer.context_lengths,
            self.scale * log2(e), shape.rows, shape.sequences, splits, shape.group, tiles.lines, shape.kv_heads,
            shape.dim, shape.padded_dim, shape.block_size, tiles.context, writes, direct, shape.starts_early,
            num_warps=tiles.warps, num_stages=tiles.stages, launch_pdl=shape.starts_early,
        )  # fmt: skip
        if not direct:
            merge_splits[shape.sequences, shape.heads](
                parts, weights, self.output, layer.query_starts, layer.context_lengths, splits,
                triton.next_power_of_2(splits), shape.heads, shape.dim, shape.padded_dim, tiles.context,
                shape.starts_early, num_warps=4, launch_pdl=shape.starts_early,
            )  # fmt: skip

    def _room_for_parts(self, splits: int) -> tuple[torch.Tensor, torch.Tensor]:
        if splits == 1:
            return self.output, self.output  # stand-ins: nothing is written to parts
        size = (self.shape.sequences, self.shape.heads, splits)
        parts = torch.empty(*size, self.shape.padded_dim, dtype=torch.float32, device=self.query.device)
        return parts, torch.empty(size, dtype=torch.float32, device=self.query.device)


def check(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: PagedLayer) -> None:
    """Raises DeepstackError where the kernels would read or write something else than is meant."""
    types = {tensor.dtype for tensor in (query, key, value, layer.keys, layer.values)}
    if len(types) > 1:
        raise DeepstackError(f"paged attention takes queries, keys, values and pool in one dtype, not {types}")
    if not (layer.keys.is_contiguous() and layer.values.is_contiguous()):
        raise DeepstackError("paged attention takes a pool whose layer is contiguous [blocks, block_size, heads, dim]")
    kv_heads, dim = layer.keys.shape[2:]
    sizes = key.shape, value.shape, layer.slots.shape
    if sizes != ((len(query), kv_heads, dim), (len(query), kv_heads, dim), (len(query),)) or query.shape[2] != dim:
        raise DeepstackError(f"paged attention of {tuple(query.shape)} does not take keys, values, slots of {sizes}")


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: PagedLayer, scale: float
) -> torch.Tensor:
    """What `paged_attention` promises, by the tiles and splits chosen here."""
    check(query, key, value, layer)
    query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
    shape, output = shape_of(query, layer), torch.empty(query.shape, dtype=query.dtype, device=query.device)
    step, by_splits = Step(query, key, value, layer, output, scale, shape), tiles_of_splits(shape)
    if not shape.rows:
        return output
    with torch.cuda.device(query.device) if query.is_cuda else nullcontext():
        if layer.max_query_length == 1 and shape.sequences:
            step.attend_by_splits(by_splits, splits_of(shape, by_splits), writes=True)
            return output
        step.write()
        if shape.sequences > 1:  # of which some may decode
            step.attend_by_splits(by_splits, splits_of(shape, by_splits), writes=False)
        if shape.sequences:
            step.attend_by_queries(tiles_of_queries(shape), skip_single=shape.sequences > 1)
    return output
