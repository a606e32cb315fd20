"""Open a checkpoint folder: its config, family and tensor contract, checked before any weight is read."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoConfig

from deepstack_serving.errors import CheckpointError
from deepstack_serving.families import family_of
from deepstack_serving.families.base import Family
from deepstack_serving.wire import FeatureContract

TRITON_DTYPES = {torch.float32: "FP32", torch.bfloat16: "BF16", torch.float16: "FP16"}
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_ADAPTER = "adapter_config.json"
_SAMPLES, _SAMPLE_BYTES = 64, 4096  # of each weight file, for the fingerprint


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder that was checked: its config, family and number type."""

    folder: Path
    config: Any
    family: Family
    dtype: torch.dtype

    @property
    def layer_count(self) -> int:
        return int(self.config.text_config.num_hidden_layers)

    @property
    def max_position_embeddings(self) -> int:
        return int(self.config.text_config.max_position_embeddings)

    @cached_property
    def deepstack_layers(self) -> tuple[int, ...]:
        return self.family.deepstack_layers(self.config)

    @cached_property
    def contract(self) -> FeatureContract:
        return FeatureContract(
            dtype=TRITON_DTYPES[self.dtype],
            hidden_size=int(self.config.text_config.hidden_size),
            position_axes=self.family.position_axes,
            deepstack_layers=tuple(sorted(self.deepstack_layers)),
            has_image_embeds=self.family.has_image_embeds,
        )

    @cached_property
    def fingerprint(self) -> str:
        """Tells checkpoints apart: a hash of the config and of each weight file's size, header and samples of its data.

        Reading all of it would take longer than loading a stage; a fine-tune changes every sample.
        """
        digest = hashlib.sha256((self.folder / "config.json").read_bytes())
        for path in weight_files(self.folder):
            size = path.stat().st_size
            digest.update(f"{path.name}:{size}".encode())
            with path.open("rb") as file:
                digest.update(file.read(int.from_bytes(file.read(8), "little")))
                for place in range(_SAMPLES):
                    file.seek(size * place // _SAMPLES)
                    digest.update(file.read(_SAMPLE_BYTES))
        return digest.hexdigest()


def open_checkpoint(folder: Path, dtype: str = "auto") -> Checkpoint:
    """Read and check everything but the weights. Raises CheckpointError naming the file and what contradicts."""
    if (folder / _ADAPTER).exists():
        raise CheckpointError(f"{folder / _ADAPTER}: adapters are not served; merge the adapter into the weights first")
    try:
        config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{folder / 'config.json'}: {error}") from error
    family = family_of(config)
    family.check_config(config)
    weight_files(folder)
    return Checkpoint(folder, config, family, _dtype(config, dtype))


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint. Raises CheckpointError when the index names one that is not there."""
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    index = folder / _INDEX
    if not index.is_file():
        raise CheckpointError(f"{folder}: neither {_SINGLE} nor {_INDEX} is there; only safetensors weights are served")
    names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    for name in names:
        if not (folder / name).is_file():
            raise CheckpointError(f"{index} names the shard {name!r}, which is not in the folder")
    return [folder / name for name in names]


def _dtype(config: Any, name: str) -> torch.dtype:
    dtype = getattr(torch, name) if name != "auto" else getattr(config, "dtype", None) or torch.float32
    if dtype not in TRITON_DTYPES:
        raise CheckpointError(
            f"the checkpoint's dtype {dtype} is not served; set 'dtype' to float32, bfloat16 or float16"
        )
    return cast(torch.dtype, dtype)
