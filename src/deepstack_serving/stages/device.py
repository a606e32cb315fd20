"""Pick and check the device of a stage, and judge what a failed call has done to it."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from deepstack_serving.errors import SettingsError, StageError, UnavailableError
from deepstack_serving.gpu_memory import free_bytes, in_gibibytes, trim_stacks
from deepstack_serving.injection import StagePlan
from deepstack_serving.settings import Settings, spare_gpu_memory


def stage_device(settings: Settings, model_name: str) -> str:
    """'cpu' or 'cuda:<index>'. Raises SettingsError when the settings name a device that is not there."""
    wanted = settings.device_of(model_name)
    count = torch.cuda.device_count()
    if wanted == "auto":
        return "cuda:0" if count else "cpu"
    if wanted != "cpu" and int(wanted.partition(":")[2]) >= count:
        key = "devices" if model_name in dict(settings.devices) else "device"
        raise SettingsError(f"setting {key!r} places {model_name!r} on {wanted}, but {_there_are(count)}")
    return wanted


def layers_on(device: str, settings: Settings, plans: Sequence[StagePlan], pipelines: Sequence[Sequence[str]]) -> int:
    """Decoder layers on a device, of the language stages of all pipelines: they share what it has for KV pools."""
    placed = [(plan, name) for names in pipelines for plan, name in zip(plans, names, strict=True)]
    sharing = [plan for plan, name in placed if stage_device(settings, name) == device]
    return sum(plan.end_layer - plan.first_layer for plan in sharing)


def use_device(device: str) -> None:
    """Make a GPU the current one of this thread, the only one whose tensors torch hands to others (DLPack).

    To be called before torch allocates anything there.
    """
    if device != "cpu":
        spare_gpu_memory()
        torch.cuda.set_device(device)
        torch.cuda.synchronize()  # there is a context from now on
        trim_stacks()


class DeviceGuard:
    """Stands around every call of a stage.

    Out of memory ends that call only. After an error that no later call on the device survives (a failed assertion in
    a kernel, an illegal access) what the stage computes is worth nothing: it refuses all calls, those for its
    `stage_info` among them, which tells the orchestrator that it is gone.
    """

    def __init__(self, model: str, device: str) -> None:
        self._model, self._device = model, device
        self._lost = ""

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Raises UnavailableError for a call that ran out of memory, StageError once the device is lost."""
        if self._lost:
            raise StageError(self._lost)
        try:
            yield
        except torch.OutOfMemoryError as error:
            traceback.clear_frames(error.__traceback__)  # they hold the tensors of the call that failed
            raise UnavailableError(self._out_of_memory()) from None
        except RuntimeError as error:
            self._probe(error)
            raise

    def _out_of_memory(self) -> str:
        left = ""
        if self._device != "cpu":
            torch.cuda.empty_cache()
            left = f", which has {in_gibibytes(free_bytes(self._device) or 0)} free without it"
        return (
            f"{self._model} ran out of memory on {self._device}{left}: send the request again while fewer run, or a "
            f"smaller one; lower 'kv_memory_fraction' or 'prefill_token_budget' if it stays"
        )

    def _probe(self, error: RuntimeError) -> None:
        """A RuntimeError may be anything; whether the device survived it, only the device can say."""
        if self._device == "cpu":
            return
        try:
            torch.cuda.synchronize(self._device)
        except RuntimeError as failure:
            reason = str(failure).partition("\n")[0]
            self._lost = f"{self._model} lost {self._device} ({reason}): unload the model and load it again"
            raise StageError(self._lost) from error


def _there_are(count: int) -> str:
    if count:
        return f"there are only cpu and cuda:0{f' to cuda:{count - 1}' if count > 1 else ''}"
    return "there is no CUDA device" if torch.version.cuda else "this build of torch is for the CPU only"
