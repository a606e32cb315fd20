"""Tiny random Qwen3-VL-MoE checkpoints, written by `tiny.write_checkpoint`: experts in all decoder layers but some."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from transformers import Qwen3VLMoeConfig

from tests.support.tiny import TinyShape


@dataclass(frozen=True)
class TinyMoeShape(TinyShape):
    """The widths are such that a transposed expert weight has another shape."""

    config_class: ClassVar[Any] = Qwen3VLMoeConfig

    experts: int = 8
    experts_per_token: int = 2
    expert_width: int = 24
    sparse_step: int = 1
    dense_layers: tuple[int, ...] = (3,)

    def text_values(self) -> dict[str, object]:
        return {
            "num_experts": self.experts,
            "num_experts_per_tok": self.experts_per_token,
            "moe_intermediate_size": self.expert_width,
            "decoder_sparse_step": self.sparse_step,
            "mlp_only_layers": list(self.dense_layers),
        }
