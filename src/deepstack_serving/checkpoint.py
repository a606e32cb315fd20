"""Open a checkpoint folder and load one stage of it, reading only that stage's weights.

A stage is the family's own transformers class whose other modules are replaced by empty placeholders before the weights
are read, so renames, tied heads and rotary buffers stay transformers' business. The loading report is checked strictly.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoConfig
from transformers.utils import logging as transformers_logging
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from deepstack_serving.errors import CheckpointError
from deepstack_serving.families import family_of
from deepstack_serving.families.base import Family
from deepstack_serving.injection import StagePlan
from deepstack_serving.wire import FeatureContract

TRITON_DTYPES = {torch.float32: "FP32", torch.bfloat16: "BF16", torch.float16: "FP16"}
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_ADAPTER = "adapter_config.json"


class Absent(nn.Identity):
    """Stands where a module of another stage would be, so that weight names keep their layer numbers."""


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
        """Tells checkpoints apart: a hash of the config and of every weight file's name, size and header."""
        digest = hashlib.sha256((self.folder / "config.json").read_bytes())
        for path in weight_files(self.folder):
            digest.update(f"{path.name}:{path.stat().st_size}".encode())
            with path.open("rb") as file:
                digest.update(file.read(int.from_bytes(file.read(8), "little")))
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


def load_vision_stage(checkpoint: Checkpoint, device: str) -> nn.Module:
    """The vision modules only, in eval mode on `device`."""
    return _load(checkpoint, device, None, "sdpa")


def load_language_stage(checkpoint: Checkpoint, plan: StagePlan, device: str, attention: str) -> nn.Module:
    """Embedding (first stage), the plan's layers, norm and head (last stage), in eval mode on `device`."""
    return _load(checkpoint, device, plan, attention)


def _load(checkpoint: Checkpoint, device: str, plan: StagePlan | None, attention: str) -> nn.Module:
    base = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(checkpoint.config)]

    def __init__(self: Any, config: Any, *args: Any, **options: Any) -> None:
        base.__init__(self, config, *args, **options)
        _keep_only(self, checkpoint.family, plan)

    # The subclass keeps the base's name and module: transformers skips its weight conversions for foreign classes.
    stage = type(base.__name__, (base,), {"__init__": __init__, "__module__": base.__module__})
    with _quiet():
        model, report = cast(Any, stage).from_pretrained(
            checkpoint.folder,
            dtype=checkpoint.dtype,
            device_map={"": device} if device != "cpu" else None,
            attn_implementation=attention,
            output_loading_info=True,
        )
    _check_report(checkpoint.folder, model, report)
    return cast(nn.Module, model.eval().requires_grad_(False))


def _keep_only(model: Any, family: Family, plan: StagePlan | None) -> None:
    """Replace what the stage does not own; runs inside from_pretrained, before any weight is read."""
    text = family.text_model(model)
    tied = bool(getattr(model.config, "tie_word_embeddings", False))
    owns_head = plan is not None and plan.is_last
    owned_layers = range(plan.first_layer, plan.end_layer) if plan else range(0)
    for layer in range(len(text.layers)):
        if layer not in owned_layers:
            text.layers[layer] = Absent()
    if not owns_head:
        text.norm = Absent()
        model.lm_head = Absent()
    if not ((plan is not None and plan.is_first) or (owns_head and tied)):  # a tied head is the embedding matrix
        text.embed_tokens = Absent()
    if not (owns_head and tied):
        model.all_tied_weights_keys = {}
    if plan is not None:
        for name in family.vision_modules:
            setattr(model.model, name, Absent())


def _check_report(folder: Path, model: nn.Module, report: dict[str, Any]) -> None:
    absent = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, Absent))
    tied = bool(getattr(model.config, "tie_word_embeddings", False))
    problems = [f"missing {key}" for key in report["missing_keys"] if not (tied and key == "lm_head.weight")]
    problems += [f"ill-fitting {key}" for key in report["mismatched_keys"]]
    problems += [f"unknown {key}" for key in report["unexpected_keys"] if not key.startswith(absent)]
    problems += [str(message) for message in report.get("error_msgs") or []]
    problems += [f"unset {name}" for name, value in model.named_parameters() if value.is_meta]
    if problems:
        raise CheckpointError(f"{folder}: the weights do not fit the config: {'; '.join(sorted(problems)[:8])}")


@contextmanager
def _quiet() -> Iterator[None]:
    """transformers lists the other stages' weights as unexpected; `_check_report` judges the report instead."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        transformers_logging.enable_progress_bar()


def _dtype(config: Any, name: str) -> torch.dtype:
    dtype = getattr(torch, name) if name != "auto" else getattr(config, "dtype", None) or torch.float32
    if dtype not in TRITON_DTYPES:
        raise CheckpointError(f"the checkpoint's dtype {dtype} is not served; set 'dtype' to float32, bfloat16 or float16")
    return cast(torch.dtype, dtype)
