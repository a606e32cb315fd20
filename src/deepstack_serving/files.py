"""Files of a checkpoint folder, read so that every refusal names the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from deepstack_serving.errors import CheckpointError


def read_object(path: Path) -> dict[str, Any]:
    """The object that a file holds. Raises CheckpointError naming the file when there is none."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: it cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: it must hold an object, not {content!r}")
    return content


def tensor_names(path: Path) -> list[str]:
    """The names in a safetensors file, sorted. Raises CheckpointError when the file is damaged or cut short."""
    try:
        with safe_open(path, "pt") as weights:
            return sorted(weights.keys())
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: it cannot be read: {error}") from error
