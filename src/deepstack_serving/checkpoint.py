"""Open a checkpoint folder: its config, family and tensor contract, checked before any weight is read."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from deepstack_serving.errors import CheckpointError
from deepstack_serving.families import family_of
from deepstack_serving.families.base import Family
from deepstack_serving.files import read_object, tensor_names
from deepstack_serving.lora import CONFIG as ADAPTER_CONFIG
from deepstack_serving.lora import LoraAdapter, open_adapter
from deepstack_serving.wire import FeatureContract

TRITON_DTYPES = {torch.float32: "FP32", torch.bfloat16: "BF16", torch.float16: "FP16"}
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_SAMPLES, _SAMPLE_BYTES = 64, 4096  # of each weight file, for the fingerprint


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder that was checked: its config, family and number type."""

    folder: Path
    config: Any
    family: Family
    dtype: torch.dtype
    adapter: LoraAdapter | None = None  # merged into the weights of each stage

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
            has_video=self.family.video_refusal(self.folder) is None,
        )

    @cached_property
    def fingerprint(self) -> str:
        """Tells checkpoints apart: a hash of the config and of each weight file's size, header and samples of its data.

        Reading all of it would take longer than loading a stage; a fine-tune changes every sample. An adapter's files
        count where it is merged.
        """
        digest = hashlib.sha256((self.folder / "config.json").read_bytes())
        adapter_config, *adapter_weights = self.adapter.files if self.adapter else (None,)
        if adapter_config is not None:
            digest.update(b"merge_adapter" + adapter_config.read_bytes())
        for path in [*weight_files(self.folder), *adapter_weights]:
            size = path.stat().st_size
            digest.update(f"{path.name}:{size}".encode())
            with path.open("rb") as file:
                digest.update(file.read(int.from_bytes(file.read(8), "little")))
                for place in range(_SAMPLES):
                    file.seek(size * place // _SAMPLES)
                    digest.update(file.read(_SAMPLE_BYTES))
        return digest.hexdigest()


def open_checkpoint(folder: Path, dtype: str = "auto", *, merge_adapter: bool = False) -> Checkpoint:
    """Read and check everything but the weights. Raises CheckpointError naming the file and what contradicts."""
    checkpoint = open_config(folder, dtype)
    for path in weight_files(folder):
        tensor_names(path)  # only its header: a file that was cut short is refused before any stage loads
    return replace(checkpoint, adapter=_adapter(folder, merge_adapter))


def open_config(folder: Path, dtype: str = "auto") -> Checkpoint:
    """Read and check `config.json` alone; weights need not be there. Raises CheckpointError like `open_checkpoint`."""
    path = folder / "config.json"
    values = read_object(path)
    family = family_of(values.get("model_type"))  # before transformers reads it: it may know the type or not
    family.check_values(values)
    if values.get("quantization_config"):
        method = values["quantization_config"]
        raise CheckpointError(f"{path}: quantization_config is {method!r}; quantized weights are not served")
    try:
        config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, StrictDataclassError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    family.check_config(config)
    return Checkpoint(folder, config, family, _dtype(config, dtype))


def _adapter(folder: Path, merge: bool) -> LoraAdapter | None:
    path = folder / ADAPTER_CONFIG
    if path.exists() != merge:
        raise CheckpointError(
            f"{path}: the setting 'merge_adapter' is {str(merge).lower()}, but the folder "
            + ("has no adapter" if merge else "has an adapter; set it to true to serve the merged weights")
        )
    return open_adapter(folder) if merge else None


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint. Raises CheckpointError when the index names one that is not there."""
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    index = folder / _INDEX
    if not index.is_file():
        raise CheckpointError(f"{folder}: neither {_SINGLE} nor {_INDEX} is there; only safetensors weights are served")
    shards = read_object(index).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise CheckpointError(f"{index}: weight_map is {shards!r}; it must name the shard of each weight")
    names = sorted({str(name) for name in shards.values()})
    for name in names:
        if not (folder / name).is_file():
            raise CheckpointError(f"{index} names the shard {name!r}, which is not in the folder")
    return [folder / name for name in names]


def _dtype(config: Any, name: str) -> torch.dtype:
    dtype = getattr(torch, name) if name != "auto" else config.dtype or config.text_config.dtype or torch.float32
    if dtype not in TRITON_DTYPES:
        raise CheckpointError(
            f"the checkpoint's dtype {dtype} is not served; set 'dtype' to float32, bfloat16 or float16"
        )
    return cast(torch.dtype, dtype)
