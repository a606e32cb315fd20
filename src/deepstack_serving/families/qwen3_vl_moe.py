"""Qwen3-VL-MoE: Qwen3-VL with experts in most decoder layers; features, positions and images are the dense family's.

Which experts a row takes and what they make of it is transformers' own code, row by row within one stage: where the
layers are cut changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepstack_serving.errors import CheckpointError
from deepstack_serving.families.qwen3_vl import Qwen3VL


class Qwen3VLMoe(Qwen3VL):
    """Expert weights are read in the hub's layout [experts, in, out] and in the one that transformers writes."""

    model_type = "qwen3_vl_moe"

    def load_options(self) -> Mapping[str, str]:
        from deepstack_serving.families.qwen3_vl_experts import EXPERTS  # slow to import

        return {"experts_implementation": EXPERTS}

    def check_config(self, config: Any) -> None:
        super().check_config(config)
        text = config.text_config
        if not 1 <= text.num_experts_per_tok <= text.num_experts:
            raise CheckpointError(
                f"config.json: text_config.num_experts_per_tok is {text.num_experts_per_tok}, but "
                f"text_config.num_experts is {text.num_experts}"
            )
        if text.decoder_sparse_step < 1:
            raise CheckpointError(
                f"config.json: text_config.decoder_sparse_step is {text.decoder_sparse_step}; it must be 1 or more"
            )
        # transformers tells the two layouts apart by shape, and loads such weights transposed without a word.
        for key, width in (("moe_intermediate_size", 1), ("2 * moe_intermediate_size", 2)):
            if width * text.moe_intermediate_size == text.hidden_size:
                raise CheckpointError(
                    f"config.json: text_config.{key.removeprefix('2 * ')} is {text.moe_intermediate_size} and "
                    f"text_config.hidden_size is {text.hidden_size}: with {key} = hidden_size the layout of the "
                    "expert weights cannot be told from their shape"
                )
