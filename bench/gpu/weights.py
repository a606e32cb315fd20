"""Random weights in the names and shapes of transformers' own model, written shard by shard."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForImageTextToText

SHARD_BYTES = 2 << 30
_SEED = 20_261
_WRITERS = 4  # as many shards are in host memory at once
_DTYPE = torch.bfloat16

Shapes = Mapping[str, Sequence[int]]


def weight_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all weights of a transformers config; tied ones once."""
    with torch.device("meta"):
        model: Any = AutoModelForImageTextToText.from_config(config)
    tied = set(model.all_tied_weights_keys) if getattr(config, "tie_word_embeddings", False) else set()
    return {name: tuple(value.shape) for name, value in model.state_dict().items() if name not in tied}


def write_weights(folder: Path, shapes: Shapes, device: str, shard_bytes: int = SHARD_BYTES) -> int:
    """Write bfloat16 shards and their index; returns the bytes of the weights. The same shapes give the same weights.

    On one kind of device: the random numbers of GPU and CPU differ.
    """
    shards = plan_shards(shapes, shard_bytes)
    names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    seeds = {name: _SEED + index for index, name in enumerate(shapes)}
    slots = threading.Semaphore(_WRITERS)

    def write(path: Path, weights: dict[str, torch.Tensor]) -> None:
        try:
            save_file(weights, path, metadata={"format": "pt"})
        finally:
            slots.release()

    with ThreadPoolExecutor(_WRITERS) as pool:
        written = []
        for file, shard in zip(names, shards, strict=True):
            slots.acquire()
            weights = {name: random_weight(name, shapes[name], seeds[name], device).cpu() for name in shard}
            written.append(pool.submit(write, folder / file, weights))
        for done in written:
            done.result()
    places = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
    total = sum(_bytes(shape) for shape in shapes.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    return total


def plan_shards(shapes: Shapes, shard_bytes: int) -> list[list[str]]:
    """The names in order, cut where a shard would grow beyond `shard_bytes`; a larger tensor has a shard of its own."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, shape in shapes.items():
        if shards[-1] and filled + _bytes(shape) > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += _bytes(shape)
    return shards


def random_weight(name: str, shape: Sequence[int], seed: int, device: str) -> torch.Tensor:
    """A spread at which activations keep their size: logits stay finite, and every feature moves them."""
    generator = torch.Generator(device).manual_seed(seed)
    noise = torch.randn(tuple(shape), generator=generator, dtype=_DTYPE, device=device)
    if len(shape) >= 2:
        return noise.mul_(1.2 / shape[-1] ** 0.5)
    return noise.mul_(0.05).add_(1.0 if "norm" in name and name.endswith("weight") else 0.0)


def _bytes(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel() * _DTYPE.itemsize
