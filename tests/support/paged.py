"""Cases of attention over pages, and what each must give: by float64 here, by the kernels on any device.

As a program it runs the cases that Triton's interpreter can on the CPU, and prints their outcomes as JSON. That takes
a process of its own: Triton reads TRITON_INTERPRET when it is first imported.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from deepstack_serving.attention import PagedLayer, packed_attention, paged_attention

TILE = 64  # context positions that the kernels take in one turn, at most
NOWHERE = 0  # a block of NaN that block tables name where nothing may look


@dataclass(frozen=True)
class Case:
    """A step: each sequence's queries and context length, of which some may be padding (0)."""

    queries: tuple[int, ...]
    contexts: tuple[int, ...]
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    block_size: int = 16
    padding_rows: int = 0
    max_queries: int = 0  # the bound that is told, if not the longest
    fused: bool = False  # queries, keys and values are slices of one tensor

    @property
    def rows(self) -> int:
        return sum(self.queries) + self.padding_rows


@dataclass(frozen=True)
class Step:
    """A case's tensors on a device. The pool is NaN but for the past tokens of the sequences' contexts."""

    case: Case
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    layer: PagedLayer
    positions: list[torch.Tensor]  # each sequence's places in the pool, oldest first
    guards: list[torch.Tensor]  # blocks of NaN before the pool's keys and values, where slot -1 would be

    @property
    def scale(self) -> float:
        return float(self.case.dim**-0.5)

    def attend(self) -> torch.Tensor:
        return paged_attention(self.query, self.key, self.value, self.layer, self.scale)


@dataclass(frozen=True)
class Outcome:
    """`error` is relative, by norm, to float64; NaN where the output has one."""

    error: float
    padding_is_zero: bool
    pool_is_right: bool


def flat(pool: torch.Tensor) -> torch.Tensor:
    """[slots, kv_heads, dim], the same memory."""
    return pool.flatten(0, 1)


def integers(numbers: Sequence[int], device: str) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def make_step(case: Case, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0) -> Step:
    generator = torch.Generator().manual_seed(seed)
    columns = max(1, *(-(-context // case.block_size) for context in case.contexts)) + 1
    blocks = torch.randperm(len(case.contexts) * columns, generator=generator) + 1
    tables = blocks.view(-1, columns).to(torch.int32)
    # Keys and values each have a storage of their own: compiled code would copy two inputs that share one.
    size = (len(blocks) + 2, case.block_size, case.kv_heads, case.dim)
    guarded = [torch.full(size, float("nan"), dtype=dtype) for _ in range(2)]
    slots, positions, starts = torch.full((case.rows,), -1), [], [0]
    for number, (queries, context) in enumerate(zip(case.queries, case.contexts, strict=True)):
        place = torch.arange(context)
        place = tables[number].long()[place // case.block_size] * case.block_size + place % case.block_size
        past = place[: context - queries] if context else place
        for tensor in guarded:
            flat(tensor[1:])[past] = torch.randn(len(past), case.kv_heads, case.dim, generator=generator).to(dtype)
        slots[starts[-1] : starts[-1] + queries] = place[len(past) :] if context else -1
        tables[number, -(-context // case.block_size) :] = NOWHERE
        starts.append(starts[-1] + queries)
        positions.append(place.to(device))
    width = case.heads + 2 * case.kv_heads
    rows = torch.randn(case.rows, width, case.dim, generator=generator).to(dtype).to(device)
    rows_of = torch.split(rows, [case.heads, case.kv_heads, case.kv_heads], 1)
    query, key, value = rows_of if case.fused else tuple(tensor.contiguous() for tensor in rows_of)
    longest, guarded = case.max_queries or max(case.queries), [tensor.to(device) for tensor in guarded]
    layer = PagedLayer(
        guarded[0][1:],
        guarded[1][1:],
        slots.to(device),
        tables.to(device),
        query_starts=integers(starts, device),
        context_lengths=integers(case.contexts, device),
        max_query_length=longest,
    )
    return Step(case, query, key, value, layer, positions, [tensor[:1] for tensor in guarded])


def written(step: Step) -> tuple[torch.Tensor, torch.Tensor]:
    """The pool's keys and values as they must be after the step."""
    keep = step.layer.slots >= 0
    pools = step.layer.keys.clone(), step.layer.values.clone()
    for pool, new in zip(pools, (step.key, step.value), strict=True):
        flat(pool)[step.layer.slots[keep]] = new[keep]
    return pools


def expected(step: Step) -> torch.Tensor:
    """[rows, heads, dim] float64, zeros for padding."""
    case, (keys, values) = step.case, written(step)
    output, start = torch.zeros(step.query.shape, dtype=torch.float64, device=step.query.device), 0
    for queries, context, place in zip(case.queries, case.contexts, step.positions, strict=True):
        if context and queries:
            key, value = (
                flat(pool)[place].double().repeat_interleave(case.heads // case.kv_heads, 1) for pool in (keys, values)
            )
            own = step.query[start : start + queries].double()
            logits = torch.einsum("qhd,khd->hqk", own, key) * step.scale
            hidden = ~torch.ones(queries, context, dtype=torch.bool, device=own.device).tril(context - queries)
            weights = logits.masked_fill(hidden, float("-inf")).softmax(-1)
            output[start : start + queries] = torch.einsum("hqk,khd->qhd", weights, value)
        start += queries
    return output


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """NaN equals NaN here."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def outcome(case: Case, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Outcome:
    step = make_step(case, dtype, device)
    right, pools, output = expected(step), written(step), step.attend()
    error = float((output.double() - right).norm()) / (float(right.norm()) or 1.0)
    padding = (right == 0).all(-1).all(-1)
    untouched = all(bool(guard.isnan().all()) for guard in step.guards)
    return Outcome(error, bool((output[padding] == 0).all()), untouched and all(map(same_bits, step.layer[:2], pools)))


def repeats(case: Case, dtype: torch.dtype, device: str) -> bool:
    """Whether the same step gives the same bits."""
    one, other = (make_step(case, dtype, device).attend() for _ in range(2))
    return same_bits(one, other)


ALONE = tuple(Case((1,), (context,)) for context in (1, 2, 15, 16, 17, TILE - 1, TILE, TILE + 1, 2 * TILE + 1))
CASES: dict[str, Case] = {
    **{f"decode one, context {case.contexts[0]}": case for case in ALONE},
    "decode batch": Case((1, 1, 1), (1, 40, 150)),
    "decode ungrouped": Case((1, 1), (70, 33), heads=2),
    "decode group of three": Case((1, 1), (70, 33), heads=6),
    "decode dim 24": Case((1, 1), (70, 33), dim=24),
    "decode fused": Case((1, 1), (70, 33), fused=True),
    "decode with padding": Case((1, 1, 1, 0), (1, 70, 0, 0), padding_rows=2),
    "decode of no sequence": Case((0, 0), (0, 0), padding_rows=3, max_queries=1),
    "decode of skipped sequences": Case((1, 0, 1), (20, 0, 9), padding_rows=1, max_queries=1),
    **{f"decode blocks of {size}": Case((1, 1), (130, 33), block_size=size) for size in (1, 3, 32, 64, 128)},
    "prefill one token": Case((1,), (1,), max_queries=2),
    **{f"prefill {count}": Case((count,), (count,)) for count in (2, 7, 8, 9, 16, 17, TILE - 1, TILE, TILE + 1)},
    "prefill ungrouped": Case((20,), (20,), heads=2),
    "prefill group of three": Case((20,), (20,), heads=6),
    "prefill one kv head": Case((9,), (30,), heads=5, kv_heads=1),
    "prefill dim 24": Case((20,), (50,), dim=24),
    "prefill dim 72": Case((5,), (20,), dim=72),
    "prefill fused": Case((20,), (50,), fused=True),
    "prefill batch": Case((20, 3, 33), (20, 3, 33)),
    "prefill with padding": Case((20, 3, 0, 2), (20, 3, 0, 0), padding_rows=5),
    "prefill told a longer bound": Case((3,), (3,), padding_rows=13, max_queries=16),
    **{f"prefill blocks of {size}": Case((20,), (70,), block_size=size) for size in (1, 3, 32, 64, 128)},
    **{f"chunk of 5 up to {context}": Case((5,), (context,)) for context in (15, 16, 17, TILE - 1, TILE, TILE + 1)},
    "chunks": Case((5, 20, 8), (70, 100, 64)),
    "mixed": Case((1, 20, 1, 3, 1), (70, 20, 1, 66, 17)),
    "mixed with padding": Case((1, 20, 1, 0), (70, 50, 0, 0), padding_rows=3),
}


EDGES = ("63", "64", "65", "batch", "chunks", "mixed", "padding")  # tiles are larger in half precision


def layer_function(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *layout: Any) -> torch.Tensor:
    """What a compiled layer does: its layout is made inside, and reaches attention as transformers hands it over."""
    query, key, value = ((tensor * 1.5).transpose(0, 1)[None] for tensor in (query, key, value))
    return packed_attention(None, query, key, value, None, packed=PagedLayer(*layout))[0][0] * 2


def compiled_equals_plain(backend: str, case: Case, dtype: torch.dtype = torch.float32, device: str = "cpu") -> bool:
    """The same result and the same writes, from a layer that compiles as one graph."""
    plain, compiled = make_step(case, dtype, device), make_step(case, dtype, device)
    function = torch.compile(layer_function, fullgraph=True, dynamic=False, backend=backend)
    outputs = [
        call(step.query, step.key, step.value, *step.layer)
        for call, step in ((layer_function, plain), (function, compiled))
    ]
    return same_bits(*outputs) and all(map(same_bits, plain.layer[:2], compiled.layer[:2]))


def main() -> None:
    torch.use_deterministic_algorithms(True)  # what nobody wrote of a new tensor is NaN
    outcomes = {f"float32, {name}": asdict(outcome(case)) for name, case in CASES.items()}
    for name, case in CASES.items():
        if any(edge in name for edge in EDGES):
            outcomes[f"float16, {name}"] = asdict(outcome(case, torch.float16))
    compiled = {name: compiled_equals_plain("aot_eager", CASES[name]) for name in ("decode batch", "mixed")}
    sys.stdout.write(json.dumps({"outcomes": outcomes, "compiled": compiled}))


if __name__ == "__main__":
    main()
