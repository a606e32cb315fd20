"""The bridge over a stand-in for `triton_python_backend_utils`, the module that only a server's process has."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch.utils.dlpack import from_dlpack

BRIDGE = "deepstack_serving.triton_bridge"
CODES = ("INVALID_ARG", "UNAVAILABLE", "CANCELLED", "INTERNAL")


class Tensor:
    """Triton's tensor in host memory: a name over memory that others share by DLPack."""

    def __init__(self, name: str, value: npt.NDArray[Any] | torch.Tensor) -> None:
        self._name, self.value = name, value

    @staticmethod
    def from_dlpack(name: str, capsule: Any) -> Tensor:
        return Tensor(name, from_dlpack(capsule))

    def name(self) -> str:
        return self._name

    def is_cpu(self) -> bool:
        return True

    def as_numpy(self) -> npt.NDArray[Any]:
        return np.asarray(self.value)

    def __dlpack__(self, **options: Any) -> Any:
        return torch.as_tensor(self.value).__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return torch.as_tensor(self.value).__dlpack_device__()


class GpuTensor(Tensor):
    """One that is on a GPU, as far as the bridge may ask: reading it on the host fails, as it does in Triton."""

    def is_cpu(self) -> bool:
        return False

    def as_numpy(self) -> npt.NDArray[Any]:
        raise RuntimeError("Tensor is stored in GPU and cannot be converted to NumPy.")

    def __dlpack__(self, **_: Any) -> Any:
        raise RuntimeError("the orchestrator has no business with memory of a GPU")


class Request:
    """A call to a stage."""

    def __init__(self, inputs: Mapping[str, Any], outputs: Sequence[str]) -> None:
        self._inputs, self._outputs = [Tensor(name, value) for name, value in inputs.items()], outputs

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def requested_output_names(self) -> Sequence[str]:
        return self._outputs


def error_code(response: Any) -> str | None:
    """The name of a response's error code; None for one without error."""
    return None if response.error is None else CODES[response.error.code]


def values(response: Any) -> dict[str, list[Any]]:
    """The outputs of a response that is no error."""
    assert response.error is None, response.error
    return {tensor.name(): tensor.value.tolist() for tensor in response.tensors}


def import_bridge(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The bridge's module, newly imported; the test's end forgets it."""
    module: Any = ModuleType("triton_python_backend_utils")
    module.Tensor = Tensor
    module.Logger = SimpleNamespace(log_error=lambda text: None)
    module.TritonError = _triton_error
    for code, name in enumerate(CODES):
        setattr(module.TritonError, name, code)
    module.InferenceResponse = lambda output_tensors, error=None: SimpleNamespace(tensors=output_tensors, error=error)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, BRIDGE, raising=False)
    bridge = importlib.import_module(BRIDGE)
    sys.modules.pop(BRIDGE)
    monkeypatch.setitem(sys.modules, BRIDGE, bridge)
    return bridge


def _triton_error(text: str, code: int = CODES.index("INTERNAL")) -> SimpleNamespace:
    return SimpleNamespace(text=text, code=code)


def array(*items: int) -> npt.NDArray[np.int64]:
    """A small host tensor."""
    return np.array(items, dtype=np.int64)
