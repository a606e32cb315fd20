"""The configurations in the model repository say what wire.py says, and leave the rest to the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format  # type: ignore[import-untyped]
from tritonclient.grpc import model_config_pb2

from deepstack_serving.wire import ORCHESTRATOR, ORCHESTRATOR_INTERFACE, VISION_ENCODER, TensorSpec

REPOSITORY = Path(__file__).resolve().parents[2] / "model_repository"
LANGUAGE = ("language_early", "language_late")
STAGES = (VISION_ENCODER, *LANGUAGE)


def configuration(model: str) -> Any:
    text = (REPOSITORY / model / "config.pbtxt").read_text()
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def spec(tensor: Any) -> TensorSpec:
    dtype = model_config_pb2.DataType.Name(tensor.data_type).removeprefix("TYPE_")
    name = "BYTES" if dtype == "STRING" else dtype
    return TensorSpec(tensor.name, name, tuple(tensor.dims), getattr(tensor, "optional", False))


def parameters(model: str) -> dict[str, str]:
    return {key: value.string_value for key, value in configuration(model).parameters.items()}


def test_repository_holds_the_four_models_and_nothing_else() -> None:
    assert {path.name for path in REPOSITORY.iterdir()} == {ORCHESTRATOR, *STAGES}


def test_orchestrator_takes_what_the_wire_defines() -> None:
    assert tuple(map(spec, configuration(ORCHESTRATOR).input)) == ORCHESTRATOR_INTERFACE.inputs


def test_orchestrator_sends_what_the_wire_defines() -> None:
    assert tuple(map(spec, configuration(ORCHESTRATOR).output)) == ORCHESTRATOR_INTERFACE.outputs


def test_only_the_orchestrator_is_decoupled() -> None:
    decoupled = [model for model in (ORCHESTRATOR, *STAGES) if configuration(model).model_transaction_policy.decoupled]
    assert decoupled == [ORCHESTRATOR]


@pytest.mark.parametrize("model", STAGES)
def test_stage_leaves_its_tensors_to_the_checkpoint(model: str) -> None:
    named = {field.name for field, _ in configuration(model).ListFields()}
    assert named <= {"backend", "instance_group", "parameters"}


@pytest.mark.parametrize("model", (ORCHESTRATOR, *STAGES))
def test_device_comes_from_the_settings(model: str) -> None:
    config = configuration(model)
    groups = [(model_config_pb2.ModelInstanceGroup.Kind.Name(item.kind), item.count) for item in config.instance_group]
    assert (config.backend, config.max_batch_size, groups) == ("python", 0, [("KIND_MODEL", 1)])


@pytest.mark.parametrize("model", (ORCHESTRATOR, *LANGUAGE))
def test_all_name_the_same_language_stages_in_order(model: str) -> None:
    assert parameters(model)["language_stages"] == ",".join(LANGUAGE)


@pytest.mark.parametrize("model", LANGUAGE)
def test_language_stage_names_its_own_place(model: str) -> None:
    assert parameters(model)["language_stage"] == model


@pytest.mark.parametrize("model", STAGES)
def test_stage_takes_its_inputs_where_they_are(model: str) -> None:
    assert parameters(model)["FORCE_CPU_ONLY_INPUT_TENSORS"] == "no"


def test_orchestrator_reads_its_clients_inputs_on_the_host() -> None:
    assert "FORCE_CPU_ONLY_INPUT_TENSORS" not in parameters(ORCHESTRATOR)
