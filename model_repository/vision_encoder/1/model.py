"""The vision encoder as a Triton model: see deepstack_serving.stages.vision."""

from __future__ import annotations

from typing import Any


class TritonPythonModel:
    """Hands Triton's callbacks to the adapter; imports wait for them, because Triton loads this file twice."""

    @staticmethod
    def auto_complete_config(auto_complete_model_config: Any) -> Any:
        from deepstack_serving.adapters import VisionModel

        return VisionModel.declare(auto_complete_model_config)

    def initialize(self, args: dict[str, str]) -> None:
        from deepstack_serving.adapters import VisionModel

        self._model = VisionModel(args["model_config"])

    def execute(self, requests: list[Any]) -> list[Any]:
        return self._model.execute(requests)

    def finalize(self) -> None:
        self._model.close()
