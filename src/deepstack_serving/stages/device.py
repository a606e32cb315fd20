"""Pick and check the device of a stage."""

from __future__ import annotations

import torch

from deepstack_serving.errors import SettingsError
from deepstack_serving.settings import Settings


def stage_device(settings: Settings, model_name: str) -> str:
    """'cpu' or 'cuda:<index>'. Raises SettingsError when the settings name a device that is not there."""
    wanted = settings.device_of(model_name)
    count = torch.cuda.device_count()
    if wanted == "auto":
        return "cuda:0" if count else "cpu"
    if wanted != "cpu" and int(wanted.partition(":")[2]) >= count:
        raise SettingsError(f"setting 'device' places {model_name!r} on {wanted}, but there are {count} CUDA devices")
    return wanted


def limit_cpu_threads(settings: Settings) -> None:
    """Apply 'cpu_threads' to this process; 0 leaves torch's own choice."""
    if settings.cpu_threads:
        torch.set_num_threads(settings.cpu_threads)
