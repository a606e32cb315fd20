"""Load one stage of a checkpoint, reading only that stage's weights.

A stage is the family's own transformers class whose other modules are replaced by empty placeholders before the weights
are read, so renames, tied heads and rotary buffers stay transformers' business. The loading report is checked strictly.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
from transformers.utils import logging as transformers_logging

from deepstack_serving.checkpoint import Checkpoint
from deepstack_serving.errors import CheckpointError, SettingsError
from deepstack_serving.families.base import Family
from deepstack_serving.gpu_memory import free_bytes, in_gibibytes
from deepstack_serving.injection import StagePlan
from deepstack_serving.stages.merging import Absent, merge_adapter


def load_vision_stage(checkpoint: Checkpoint, device: str) -> nn.Module:
    """The vision modules only, in eval mode on `device`."""
    return _load(checkpoint, device, None, "sdpa")


def load_language_stage(checkpoint: Checkpoint, plan: StagePlan, device: str, attention: str) -> nn.Module:
    """Embedding (first stage), the plan's layers, norm and head (last stage), in eval mode on `device`."""
    return _load(checkpoint, device, plan, attention)


def stage_skeleton(checkpoint: Checkpoint, plan: StagePlan | None) -> nn.Module:
    """What would be loaded (None: the vision stage), on torch's meta device: shapes and number types, no storage."""
    config = copy.deepcopy(checkpoint.config)  # transformers writes its choices into the config of a model
    with torch.device("meta"):
        return cast(nn.Module, _stage_class(checkpoint, plan)(config).to(checkpoint.dtype))


def _load(checkpoint: Checkpoint, device: str, plan: StagePlan | None, attention: str) -> nn.Module:
    free = free_bytes(device)
    with _quiet(), _base_folder(checkpoint) as folder:
        try:
            model, report = _stage_class(checkpoint, plan).from_pretrained(
                folder,
                dtype=checkpoint.dtype,
                device_map={"": device} if device != "cpu" else None,
                attn_implementation=attention,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **checkpoint.family.load_options(),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{checkpoint.folder}: transformers cannot build the model: {error!r}") from error
        except RuntimeError as error:
            _check_room(checkpoint, plan, device, free, error)
            raise
    _check_report(checkpoint.folder, model, report)
    if checkpoint.adapter is not None:
        merge_adapter(model, checkpoint.adapter)
    torch.cuda.empty_cache()  # does nothing in a process without a GPU
    return cast(nn.Module, model.eval().requires_grad_(False))


def _check_room(
    checkpoint: Checkpoint, plan: StagePlan | None, device: str, free: int | None, error: RuntimeError
) -> None:
    """Raises SettingsError where a load failed for want of GPU memory; transformers hides some of torch's errors."""
    needed = sum(weight.nbytes for weight in stage_skeleton(checkpoint, plan).parameters())
    if isinstance(error, torch.OutOfMemoryError) or (free is not None and needed > free):
        left = "" if free is None else f", which had {in_gibibytes(free)} free"
        raise SettingsError(
            f"{checkpoint.folder}: {in_gibibytes(needed)} of weights do not fit on {device}{left}; place the stage "
            f"elsewhere by 'device' or 'devices', or give it fewer layers by 'split_points'"
        ) from error


def _stage_class(checkpoint: Checkpoint, plan: StagePlan | None) -> Any:
    """The family's transformers class, which drops the other stages' modules while it is built."""
    base = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(checkpoint.config)]

    def __init__(self: Any, config: Any, *args: Any, **options: Any) -> None:  # noqa: N807 - becomes the class's own
        base.__init__(self, config, *args, **options)
        _keep_only(self, checkpoint.family, plan)

    # The subclass keeps the base's name and module: transformers skips its weight conversions for foreign classes.
    return type(base.__name__, (base,), {"__init__": __init__, "__module__": base.__module__})


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
    names = [f"{name}." for name, module in model.named_modules() if isinstance(module, Absent)]
    # Files may leave the model's prefix out; only names that the stage owns get it back.
    absent = (*names, *(name.removeprefix(f"{cast(Any, model).base_model_prefix}.") for name in names))
    tied = bool(getattr(model.config, "tie_word_embeddings", False))
    problems = [f"missing {key}" for key in report["missing_keys"] if not (tied and key == "lm_head.weight")]
    problems += [f"ill-fitting {key}" for key in report["mismatched_keys"]]
    problems += [f"unknown {key}" for key in report["unexpected_keys"] if not key.startswith(absent)]
    problems += [str(message) for message in report.get("error_msgs") or []]
    problems += [f"unset {name}" for name, value in model.named_parameters() if value.is_meta]
    if problems:
        raise CheckpointError(f"{folder}: the weights do not fit the config: {'; '.join(sorted(problems)[:8])}")


@contextmanager
def _base_folder(checkpoint: Checkpoint) -> Iterator[Path]:
    """The folder without its adapter, which transformers would load by itself wherever `peft` is installed."""
    if checkpoint.adapter is None:
        yield checkpoint.folder
        return
    with TemporaryDirectory() as view:
        for path in checkpoint.folder.resolve().iterdir():
            if path.name not in {file.name for file in checkpoint.adapter.files}:
                (Path(view) / path.name).symlink_to(path)
        yield Path(view)


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
