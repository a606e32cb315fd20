"""Refusing a processor that contradicts the model: which file states a value, and what the refusal says."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path
from typing import Any

from deepstack_serving.errors import CheckpointError
from deepstack_serving.files import read_object

PROCESSOR, IMAGES, VIDEOS = "processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"


def holder(checkpoint: Path, key: str, default: str = PROCESSOR) -> Path:
    """The file that states this key; where none does, transformers' default holds."""
    for path in (checkpoint / PROCESSOR, checkpoint / IMAGES):
        content = read_object(path) if path.is_file() else {}
        if key in content or key in content.get("image_processor", {}):
            return path
    return checkpoint / default


def disagreement(path: Path, key: str, value: object, config: Any, model_key: str) -> CheckpointError:
    """What to raise where `key` of a processor's file differs from what the config holds under `model_key`."""
    wanted = attrgetter(model_key)(config)
    return CheckpointError(f"{path}: {key} is {value!r}, but config.json has {model_key} {wanted!r}")
