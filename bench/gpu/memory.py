"""Bytes that a deployment takes by plan, so that what is beyond weights and KV pool can be told from what is in use."""

from __future__ import annotations

import urllib.request
from pathlib import Path
from typing import Any

from deepstack_serving.checkpoint import Checkpoint, open_checkpoint
from deepstack_serving.injection import plan_stages
from deepstack_serving.kv_pool import kv_shape
from deepstack_serving.planning.sizes import measure, stage_bytes
from deepstack_serving.settings import Settings

_BLOCKS = "deepstack_kv_blocks_total"
_CALL_LIMIT_S = 30.0


def planned_bytes(settings: Settings, stages: int, pipelines: int, kv_tokens: int) -> dict[str, int]:
    """Weights of the encoders and all stages, and the KV pools of all layers."""
    checkpoint = open_checkpoint(settings.checkpoint, settings.dtype)
    plans = plan_stages(checkpoint.layer_count, stages, settings.split_points, checkpoint.deepstack_layers)
    weights = pipelines * sum(stage_bytes(checkpoint, plan) for plan in (None, *plans))
    per_token = checkpoint.layer_count * _kv_bytes(checkpoint)
    return {"weights": weights, "kv_pool": kv_tokens * per_token, "kv_bytes_per_token": per_token}


def bytes_read_per_step(folder: Path) -> int:
    """Weight bytes that one decode step of one sequence must read: layers and head, of experts only those chosen."""
    checkpoint = open_checkpoint(folder)
    parts = measure(checkpoint)
    return sum(parts.layers) - _idle_expert_bytes(checkpoint) + parts.last


def _idle_expert_bytes(checkpoint: Checkpoint) -> int:
    """Bytes of the experts that a single token does not take; 0 without experts."""
    text: Any = checkpoint.config.text_config
    experts = int(getattr(text, "num_experts", 0) or 0)
    if not experts:
        return 0
    dense, step = set(text.mlp_only_layers or ()), int(text.decoder_sparse_step)
    sparse = sum(layer not in dense and (layer + 1) % step == 0 for layer in range(checkpoint.layer_count))
    one = 3 * int(text.moe_intermediate_size) * int(text.hidden_size) * checkpoint.dtype.itemsize
    return sparse * (experts - int(text.num_experts_per_tok)) * one


def kv_blocks(metrics_address: str) -> int:
    """Blocks of the pool that the orchestrator hands out, off the metrics endpoint."""
    with urllib.request.urlopen(f"http://{metrics_address}/metrics", timeout=_CALL_LIMIT_S) as reply:
        lines = reply.read().decode().splitlines()
    return int(float(next(line.split()[-1] for line in lines if line.startswith(_BLOCKS))))


def _kv_bytes(checkpoint: Checkpoint) -> int:
    return kv_shape(checkpoint.config.text_config, checkpoint.dtype).bytes_per_token_and_layer
