"""The orchestrator as a decoupled Triton model: see deepstack_serving.engine."""

from __future__ import annotations

from typing import Any


class TritonPythonModel:
    """Hands Triton's callbacks to the adapter; imports wait for them, so that loading this file is cheap."""

    def initialize(self, args: dict[str, str]) -> None:
        from deepstack_serving.adapters import OrchestratorModel

        self._model = OrchestratorModel(args["model_config"])

    def is_ready(self) -> bool:
        return self._model.is_ready()

    def execute(self, requests: list[Any]) -> None:
        self._model.execute(requests)

    def finalize(self) -> None:
        self._model.close()
