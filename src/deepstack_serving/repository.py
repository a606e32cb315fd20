"""Write a Triton model repository with any number of language stages.

The committed `model_repository/` has two and is what `write_repository` writes; a test says so.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from deepstack_serving.errors import SettingsError
from deepstack_serving.pipelines import PIPELINES, STAGES, Pipelines
from deepstack_serving.wire import ORCHESTRATOR, ORCHESTRATOR_INTERFACE, TensorSpec

TWO_STAGES = ("language_early", "language_late")

_HEAD = """\
backend: "python"
max_batch_size: 0
instance_group [ { kind: KIND_MODEL, count: 1 } ]
"""
_VISION_COMMENT = """\
# Image files in, image_embeds and one ds_<layer> per deepstack level out. Inputs and outputs are completed from the
# checkpoint when the model loads; the device comes from the settings.
"""
_LANGUAGE_COMMENT = """\
# A range of decoder layers. Inputs and outputs, its ds_<layer> tensors among them, are completed from the checkpoint
# and the split when the model loads; the device comes from the settings.
"""
_ORCHESTRATOR_COMMENT = """\
# What clients call: a question with images in, text out, piece by piece or whole. Follows Triton's vLLM backend.
"""
_GPU_INPUTS = [("FORCE_CPU_ONLY_INPUT_TENSORS", "no")]  # a stage takes its inputs where they are, on a GPU too
_PARAMETER = 'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'
_STATED = re.compile(rf'key:\s*"(?P<key>{STAGES}|{PIPELINES})"\s*value\s*{{\s*string_value:\s*"(?P<value>[^"]+)"')

_MODEL = '''\
"""{title} as a {kind}Triton model: see deepstack_serving.{module}."""

from __future__ import annotations

from typing import Any


class TritonPythonModel:
    """Hands Triton's callbacks to the adapter; imports wait for them, {reason}."""

{methods}'''
_COMPLETE = """\
    @staticmethod
    def auto_complete_config(auto_complete_model_config: Any) -> Any:
        from deepstack_serving.adapters import {adapter}

        return {adapter}.declare(auto_complete_model_config)

"""
_INITIALIZE = """\
    def initialize(self, args: dict[str, str]) -> None:
        from deepstack_serving.adapters import {adapter}

        self._model = {adapter}(args["model_config"])
"""
_IS_READY = """
    def is_ready(self) -> bool:
        return self._model.is_ready()
"""
_EXECUTE = """
    def execute(self, requests: list[Any]) -> list[Any]:
        return self._model.execute(requests)
"""
_EXECUTE_DECOUPLED = """
    def execute(self, requests: list[Any]) -> None:
        self._model.execute(requests)
"""
_FINALIZE = """
    def finalize(self) -> None:
        self._model.close()
"""
_TWICE = "because Triton loads this file twice"
_CHEAP = "so that loading this file is cheap"


def stage_names(count: int) -> tuple[str, ...]:
    """Model names of `count` language stages."""
    return {1: ("language",), 2: TWO_STAGES}.get(count, tuple(f"language_{index}" for index in range(count)))


def model_names(stages: Sequence[str] = TWO_STAGES, pipelines: int = 1) -> tuple[str, ...]:
    """All models of a repository."""
    return Pipelines(tuple(stages), pipelines).models


def write_repository(folder: Path, stages: Sequence[str] = TWO_STAGES, pipelines: int = 1) -> None:
    """Create the models' files below `folder`."""
    written = Pipelines(tuple(stages), pipelines)
    for name in written.encoders:
        _write(folder / name, _VISION_COMMENT + _HEAD + _parameters(_GPU_INPUTS), _vision_model())
    for name in (name for names in written.languages for name in names):
        parameters = [*_GPU_INPUTS, *written.parameters, ("language_stage", name)]
        _write(folder / name, _LANGUAGE_COMMENT + _HEAD + _parameters(parameters), _language_model())
    _write(folder / ORCHESTRATOR, _orchestrator_config(written), _orchestrator_model())


def pipelines_of(folder: Path) -> Pipelines:
    """What a repository holds, as its orchestrator says. Raises SettingsError where it does not."""
    config = folder / ORCHESTRATOR / "config.pbtxt"
    text = config.read_text() if config.is_file() else ""
    found = {match["key"]: match["value"] for match in _STATED.finditer(text)}
    if STAGES not in found:
        raise SettingsError(f"{config} has no parameter {STAGES!r}; write a repository with: deepstack repository")
    return Pipelines.parse(found)


def is_model(path: Path) -> bool:
    """Whether `write_repository` can have written this folder."""
    model = path / "1" / "model.py"
    return model.is_file() and "from deepstack_serving.adapters import" in model.read_text()


def _write(folder: Path, config: str, model: str) -> None:
    (folder / "1").mkdir(parents=True, exist_ok=True)
    (folder / "config.pbtxt").write_text(config)
    (folder / "1" / "model.py").write_text(model)


def _vision_model() -> str:
    initialize = _INITIALIZE.format(adapter="VisionModel")
    methods = _COMPLETE.format(adapter="VisionModel") + initialize + _EXECUTE + _FINALIZE
    return _MODEL.format(title="The vision encoder", kind="", module="stages.vision", reason=_TWICE, methods=methods)


def _language_model() -> str:
    initialize = _INITIALIZE.format(adapter="LanguageModel")
    methods = _COMPLETE.format(adapter="LanguageModel") + initialize + _EXECUTE
    return _MODEL.format(title="A language stage", kind="", module="stages.language", reason=_TWICE, methods=methods)


def _orchestrator_model() -> str:
    initialize = _INITIALIZE.format(adapter="OrchestratorModel")
    methods = initialize + _IS_READY + _EXECUTE_DECOUPLED + _FINALIZE
    return _MODEL.format(title="The orchestrator", kind="decoupled ", module="engine", reason=_CHEAP, methods=methods)


def _orchestrator_config(pipelines: Pipelines) -> str:
    decoupled = "model_transaction_policy { decoupled: true }\n"
    inputs = ",\n".join(_tensor(spec) for spec in ORCHESTRATOR_INTERFACE.inputs)
    outputs = ",\n".join(_tensor(spec) for spec in ORCHESTRATOR_INTERFACE.outputs)
    tensors = f"input [\n{inputs}\n]\noutput [\n{outputs}\n]\n"
    parameters = _parameters(pipelines.parameters)
    return _ORCHESTRATOR_COMMENT + _HEAD + decoupled + parameters + tensors


def _parameters(pairs: Sequence[tuple[str, str]]) -> str:
    return "".join(_PARAMETER.format(key=key, value=value) for key, value in pairs)


def _tensor(spec: TensorSpec) -> str:
    dtype = "STRING" if spec.dtype == "BYTES" else spec.dtype
    optional = ", optional: true" if spec.optional else ""
    return f'  {{ name: "{spec.name}", data_type: TYPE_{dtype}, dims: [ {spec.shape[0]} ]{optional} }}'
