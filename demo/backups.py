"""Saves training while it runs, so that a run that is cut off leaves a checkpoint and can be taken up again.

A folder holds `checkpoint.tar`, a checkpoint folder that can be used as it is, and `state-<n>.safetensors`: weights and
the optimiser's moments, in files small enough to be carried off a machine one by one.
"""

from __future__ import annotations

import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

FILE_BYTES = 14 * 1024 * 1024
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Progress:
    """How far training has come, earlier runs that were taken up again included."""

    steps: int = 0
    seconds: float = 0.0
    pictures: int = 0


def save_backup(
    folder: Path,
    write_checkpoint: Callable[[Path], None],
    parameters: Sequence[Tensor],
    optimizer: torch.optim.Optimizer,
    progress: Progress,
) -> None:
    """Replace the folder's files one by one; each is complete at any time."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        checkpoint, packed = Path(place) / "checkpoint", folder / ".checkpoint.tar"
        write_checkpoint(checkpoint)
        with tarfile.open(packed, "w") as archive:
            for path in sorted(checkpoint.iterdir()):
                archive.add(path, path.name)
        packed.replace(folder / "checkpoint.tar")
    metadata = {key: str(value) for key, value in asdict(progress).items()}
    for number, tensors in enumerate(_in_files(_state(parameters, optimizer))):
        written = folder / f".state-{number}.safetensors"
        save_file(tensors, written, metadata)
        written.replace(folder / f"state-{number}.safetensors")


@torch.no_grad()
def load_backup(folder: Path, parameters: Sequence[Tensor], optimizer: torch.optim.Optimizer) -> Progress:
    """Put weights and moments back. Raises ValueError unless the files are those of one moment and of this model."""
    files = sorted(folder.glob("state-*.safetensors"))
    reading: Any = safe_open
    marks: list[dict[str, str]] = [reading(file, "pt").metadata() for file in files]
    if not marks or any(mark != marks[0] for mark in marks):
        raise ValueError(f"{folder}: state-*.safetensors are missing or of different moments: {marks}")
    state = {name: value for file in files for name, value in load_file(file).items()}
    wanted = {f"{number}.{kind}" for number in range(len(parameters)) for kind in ("weight", *MOMENTS)}
    if state.keys() != wanted:
        raise ValueError(f"{folder}: {len(state)} tensors, but this model and its probes have {len(wanted)}")
    steps = int(marks[0]["steps"])
    for number, parameter in enumerate(parameters):
        parameter.copy_(state[f"{number}.weight"])
        moments = {kind: state[f"{number}.{kind}"].to(parameter) for kind in MOMENTS}
        optimizer.state[parameter] = {"step": torch.tensor(float(steps), device=_step_device(optimizer, parameter))}
        optimizer.state[parameter].update(moments)
    return Progress(steps, float(marks[0]["seconds"]), int(marks[0]["pictures"]))


def _step_device(optimizer: torch.optim.Optimizer, parameter: Tensor) -> torch.device:
    """The fused optimiser counts its steps on the device."""
    return parameter.device if optimizer.param_groups[0]["fused"] else torch.device("cpu")


def _state(parameters: Sequence[Tensor], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Moments as bfloat16: they need the range, not the digits."""
    state: dict[str, Tensor] = {}
    for number, parameter in enumerate(parameters):
        state[f"{number}.weight"] = parameter.detach().to("cpu", copy=True).contiguous()
        for kind in MOMENTS:
            state[f"{number}.{kind}"] = optimizer.state[parameter][kind].to("cpu", torch.bfloat16, copy=True)
    return state


def _in_files(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """In order, a new file where the last one is full."""
    files: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, value in tensors.items():
        if size + value.nbytes > FILE_BYTES:
            files.append({})
            size = 0
        files[-1][name] = value
        size += value.nbytes
    return files
