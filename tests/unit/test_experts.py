"""Experts in compiled code: a single row takes the batched product, more rows the grouped one, with equal results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import Qwen3VLMoeTextConfig
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeTextExperts

from deepstack_serving.families.qwen3_vl_experts import EXPERTS

EXPERT_COUNT, CHOSEN, WIDTH = 8, 3, 16


@pytest.fixture
def module() -> Any:
    config = Qwen3VLMoeTextConfig(
        num_experts=EXPERT_COUNT, num_experts_per_tok=CHOSEN, hidden_size=WIDTH, moe_intermediate_size=24
    )
    config._experts_implementation = EXPERTS
    made = Qwen3VLMoeTextExperts(config).requires_grad_(False)
    for weight in made.parameters():
        weight.normal_()
    return made


def inputs(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    weights, chosen = torch.rand(rows, EXPERT_COUNT).topk(CHOSEN)
    return torch.randn(rows, WIDTH), chosen, weights


@pytest.mark.parametrize(("rows", "products"), [(1, 2), (2, 0), (5, 0)])
def test_single_row_takes_the_batched_product(module: Any, rows: int, products: int) -> None:
    seen: list[str] = []

    def keep(graph: torch.fx.GraphModule, _inputs: object) -> Callable[..., Any]:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    torch.manual_seed(rows)
    given = inputs(rows)
    expected = module(*given)
    result = torch.compile(module, backend=keep, dynamic=False)(*given)
    assert sum("bmm" in target for target in seen) == products
    assert torch.allclose(result, expected, atol=1e-4)
    assert not torch.allclose(expected, torch.zeros_like(expected), atol=1e-2)
