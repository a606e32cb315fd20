"""The keys and values of one language stage's own layers, in blocks that the orchestrator hands out by number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from deepstack_serving.errors import SettingsError
from deepstack_serving.gpu_memory import free_bytes, in_gibibytes


@dataclass(frozen=True)
class KVShape:
    """What one token's keys (or values) take in one layer."""

    heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token_and_layer(self) -> int:
        return 2 * self.heads * self.head_dim * self.dtype.itemsize


class KVPool:
    """Two tensors [layers, blocks, block_size, heads, head_dim]; whose a block is, only the orchestrator knows."""

    def __init__(
        self, first_layer: int, layers: int, blocks: int, block_size: int, shape: KVShape, device: str
    ) -> None:
        self.first_layer = first_layer
        self.blocks = blocks
        self.block_size = block_size
        size = (layers, blocks, block_size, shape.heads, shape.head_dim)
        wanted, free = blocks * block_size * layers * shape.bytes_per_token_and_layer, free_bytes(device)
        if free is not None and wanted > free:
            raise _too_large(blocks, wanted, device, free)
        try:
            # Not cleared: a sequence reads only slots that it has written. On a CPU, pages come as they are used.
            self.keys = torch.empty(size, dtype=shape.dtype, device=device)
            self.values = torch.empty_like(self.keys)
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            raise _too_large(blocks, wanted, device, free) from error

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer by its number in the checkpoint, each [blocks, block_size, heads, head_dim]."""
        return self.keys[layer - self.first_layer], self.values[layer - self.first_layer]


def kv_shape(text_config: Any, dtype: torch.dtype) -> KVShape:
    """The KV shape of a transformers text config."""
    head_dim = getattr(text_config, "head_dim", None) or text_config.hidden_size // text_config.num_attention_heads
    return KVShape(int(text_config.num_key_value_heads), int(head_dim), dtype)


def blocks_for_memory(memory_bytes: float, layers: int, block_size: int, shape: KVShape) -> int:
    """How many blocks fit in the memory, when this many layers in all keep their share on the device."""
    return int(memory_bytes // (max(layers, 1) * shape.bytes_per_token_and_layer * block_size))


def _too_large(blocks: int, wanted: int, device: str, free: int | None) -> SettingsError:
    left = "" if free is None else f", which has {in_gibibytes(free)} free"
    return SettingsError(
        f"a KV pool of {blocks} blocks ({in_gibibytes(wanted)}) does not fit on {device}{left}; lower "
        f"'kv_pool_tokens' or 'kv_memory_fraction'"
    )
