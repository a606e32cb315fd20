"""Attention over pages on a GPU: every case against float64, in a CUDA graph, and inside a compiled function."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from deepstack_serving.attention import PagedLayer, paged_attention
from tests.support.paged import (
    CASES,
    Case,
    Step,
    compiled_equals_plain,
    expected,
    make_step,
    outcome,
    repeats,
    same_bits,
    written,
)

LARGEST_ERROR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
SIZES: dict[str, Any] = {"heads": 32, "kv_heads": 8, "dim": 128}
LARGE = {
    **{f"dim {dim}": Case((1, 70, 1), (300, 70, 5), dim=dim) for dim in (64, 72, 80, 96, 128, 256)},
    **{f"decode dim {dim}": Case((1, 1), (300, 65), dim=dim) for dim in (64, 72, 80, 96, 128, 256)},
    "decode batch of 64": Case((1,) * 64, tuple(range(1, 1025, 16)), block_size=128, **SIZES),
    "decode one of 4000": Case((1,), (4000,), block_size=128, **SIZES),
    "prefill 1088": Case((1088,), (1088,), block_size=16, **SIZES),
    "chunk of 200 up to 3000": Case((200,), (3000,), block_size=128, **SIZES),
    "mixed, 4 and 3": Case((1, 300, 1, 0), (2000, 301, 7, 0), padding_rows=20, block_size=128, **SIZES),
}


@pytest.fixture(autouse=True)
def unwritten_is_nan() -> Iterator[None]:
    """A new tensor is NaN until it is written."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # of cuBLAS, which only the expectation uses
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", LARGEST_ERROR, ids=str)
@pytest.mark.parametrize("name", [*CASES, *LARGE])
def test_case_equals_float64(name: str, dtype: torch.dtype) -> None:
    case = {**CASES, **LARGE}[name]
    result = outcome(case, dtype, "cuda")
    assert result.error < LARGEST_ERROR[dtype]
    assert result.padding_is_zero and result.pool_is_right
    assert repeats(case, dtype, "cuda")


def overwrite(step: Step, other: Step) -> None:
    """Another step's inputs in this step's memory."""
    tensors = (step.query, step.key, step.value, *step.layer[:-1])
    for tensor, new in zip(tensors, (other.query, other.key, other.value, *other.layer[:-1]), strict=True):
        tensor.copy_(new)


GRAPHS = {
    "decode": (
        Case((1, 1, 1, 1), (500, 3, 64, 129), block_size=128, **SIZES),
        Case((1, 1, 0, 0), (400, 512, 0, 0), block_size=128, padding_rows=2, max_queries=1, **SIZES),
    ),
    "prefill": (
        Case((200, 0, 0), (500, 0, 0), block_size=128, **SIZES),
        Case((90, 1, 70), (90, 512, 71), block_size=128, padding_rows=39, max_queries=200, **SIZES),
    ),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_graph_replays_steps_other_than_the_captured_one(name: str) -> None:
    captured, other = (make_step(case, torch.bfloat16, "cuda", seed) for seed, case in enumerate(GRAPHS[name]))
    again = make_step(GRAPHS[name][0], torch.bfloat16, "cuda", seed=2)
    make_step(GRAPHS[name][0], torch.bfloat16, "cuda").attend()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = captured.attend()
    for step in (other, again, other):
        right, pools = expected(step), written(step)
        overwrite(captured, step)
        output.fill_(float("nan"))
        graph.replay()
        assert (output.double() - right).norm() / right.norm() < LARGEST_ERROR[torch.bfloat16]
        assert all(map(same_bits, captured.layer[:2], pools))
        assert not output[sum(step.case.queries) :].any()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", ["decode batch", "mixed", "prefill with padding"])
def test_compiled_layer_equals_plain(name: str, backend: str) -> None:
    assert compiled_equals_plain(backend, CASES[name], torch.bfloat16, "cuda")


def test_compiled_layer_does_not_copy_its_pool() -> None:
    """The pool fills the GPU: compiled code that copied a layer of it, even once, would have no room."""
    step = make_step(Case((1, 1), (40, 7), block_size=128, **SIZES), torch.bfloat16, "cuda")
    keys, values = (torch.zeros(2048, 128, 8, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    layer = step.layer._replace(keys=keys, values=values)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *layout: Any) -> torch.Tensor:
        return paged_attention(query * 2, key * 2, value * 2, PagedLayer(*layout), 0.1)

    compiled = torch.compile(attend, fullgraph=True, dynamic=False)
    with torch.inference_mode():
        compiled(step.query, step.key, step.value, *layer)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        compiled(step.query, step.key, step.value, *layer)
    assert torch.cuda.max_memory_allocated() - before < keys.nbytes // 2
