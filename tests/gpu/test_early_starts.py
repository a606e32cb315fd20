"""Kernels of a single row start while the ones before them end: none may read what is not written yet.

In a graph they overlap as closely as they ever do; launched one by one from Python hardly ever.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModel, Qwen3VLConfig, Qwen3VLMoeConfig

from deepstack_serving.attention import ATTENTION, PagedLayer
from deepstack_serving.execution.compiled import CompiledLayers
from deepstack_serving.execution.recorder import CudaRecorder
from deepstack_serving.families.qwen3_vl_experts import EXPERTS

LAYERS, STEPS = 4, 200
BLOCKS, BLOCK_SIZE, CONTEXT = 32, 64, 1100
HEADS = {"num_attention_heads": 32, "head_dim": 128, "num_hidden_layers": LAYERS, "vocab_size": 64}
WIDTHS: dict[str, tuple[Any, dict[str, Any]]] = {
    "2b": (Qwen3VLConfig, {"hidden_size": 2048, "intermediate_size": 6144, "num_key_value_heads": 8}),
    "8b": (Qwen3VLConfig, {"hidden_size": 4096, "intermediate_size": 12288, "num_key_value_heads": 8}),
    "30b-a3b": (
        Qwen3VLMoeConfig,
        {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
    ),
}


class Stack:
    """Some decoder layers of a real width with random weights, and a step of one sequence through them."""

    def __init__(self, name: str) -> None:
        make, values = WIDTHS[name]
        config = make(text_config={**HEADS, **values}).text_config
        options = {"experts_implementation": EXPERTS} if "num_experts" in values else {}
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = AutoModel.from_config(config, dtype=torch.bfloat16, attn_implementation=ATTENTION, **options).eval()
        self._layers = CompiledLayers(dict(enumerate(model.layers)), dynamic=False, autotune=False)
        size = (LAYERS, BLOCKS, BLOCK_SIZE, config.num_key_value_heads, config.head_dim)
        self._keys, self._values = (torch.randn(size, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        self.hidden = torch.zeros(1, 1, config.hidden_size, dtype=torch.bfloat16, device="cuda")
        angles = torch.randn(1, 1, config.head_dim, device="cuda")
        self._rotary = angles.cos().bfloat16(), angles.sin().bfloat16()
        self._layout = (
            torch.tensor([CONTEXT - 1], device="cuda"),
            torch.arange(BLOCKS, dtype=torch.int32, device="cuda")[None],
            torch.tensor([0, 1], dtype=torch.int32, device="cuda"),
            torch.tensor([CONTEXT], dtype=torch.int32, device="cuda"),
        )

    def step(self) -> torch.Tensor:
        """`hidden` [1, 1, width] through the layers."""
        hidden = self.hidden
        for layer in range(LAYERS):
            packed = PagedLayer(self._keys[layer], self._values[layer], *self._layout, max_query_length=1)
            hidden = self._layers(layer, hidden, self._rotary, packed)
        return hidden


@pytest.mark.parametrize("name", WIDTHS)
def test_replays_equal_kernels_launched_one_by_one(name: str) -> None:
    stack = Stack(name)
    seen = set()
    with torch.inference_mode():
        replay = CudaRecorder("cuda:0").record(lambda: {"hidden": stack.step()})
        output = replay.output["hidden"]
        for seed in range(STEPS):
            torch.manual_seed(seed)
            stack.hidden.normal_()
            expected = stack.step().clone()
            output.fill_(float("nan"))
            replay()
            assert torch.equal(output, expected), f"step {seed}"
            seen.add(expected.float().sum().item())
    assert len(seen) > STEPS // 2  # other rows give other results
