"""How the experts of Qwen3-VL-MoE are computed: by transformers' own functions, chosen by what they cost."""

from __future__ import annotations

import torch
from transformers.integrations.moe import (
    ExpertsInterface,
    batched_mm_experts_forward,
    grouped_mm_experts_forward,
)

EXPERTS = "deepstack_experts"


def experts(module: torch.nn.Module, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """hidden [rows, width], the experts of each row and their weights, both [rows, experts] -> [rows, width].

    One grouped product, but for a single row in compiled code: there the batched product becomes a reduction that reads
    the chosen experts' weights where they lie, without sorting rows or starting groups.
    """
    is_single = torch.compiler.is_compiling() and hidden.shape[0] == 1
    compute = batched_mm_experts_forward if is_single else grouped_mm_experts_forward
    result: torch.Tensor = compute(module, hidden, chosen, weights)
    return result


ExpertsInterface.register(EXPERTS, experts)
