"""The committed model repository is what the package writes, and repositories of other sizes fit together.

Each stage finds its place in its own config.pbtxt, as Triton hands it over, and declares its tensors from there.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from google.protobuf import text_format  # type: ignore[import-untyped]
from tritonclient.grpc import model_config_pb2

from deepstack_serving.checkpoint import open_config
from deepstack_serving.errors import SettingsError
from deepstack_serving.pipelines import Pipelines
from deepstack_serving.repository import model_names, pipelines_of, stage_names, write_repository
from deepstack_serving.settings import Settings, parse_settings
from deepstack_serving.stages.place import StagePlace
from deepstack_serving.wire import ORCHESTRATOR, ModelInterface, language_interface, vision_interface

COMMITTED = Path(__file__).parents[2] / "model_repository"
CONFIGS = Path(__file__).parents[1] / "data" / "configs"
COUNTS = range(1, 9)


def files(folder: Path) -> dict[str, str]:
    found = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {str(path.relative_to(folder)): path.read_text() for path in found}


def test_the_committed_repository_is_the_written_one(tmp_path: Path) -> None:
    write_repository(tmp_path)
    assert files(tmp_path) == files(COMMITTED)


@pytest.mark.parametrize("count", COUNTS)
def test_a_repository_holds_every_stage_and_nothing_else(tmp_path: Path, count: int) -> None:
    write_repository(tmp_path, stage_names(count))
    assert {path.name for path in tmp_path.iterdir()} == set(model_names(stage_names(count)))


def parameters(repository: Path, model: str) -> dict[str, str]:
    config = text_format.Parse((repository / model / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())
    return {key: value.string_value for key, value in config.parameters.items()}


def settings(name: str, **values: str) -> Settings:
    return parse_settings({"checkpoint": str(CONFIGS / name), **values})


def interfaces(repository: Path, stages: tuple[str, ...], used: Settings) -> list[ModelInterface]:
    """What each stage declares, as it does on a server, from the encoder on."""
    checkpoint = open_config(used.checkpoint)
    places = [StagePlace.parse(parameters(repository, name)) for name in stages]
    declared = [language_interface(checkpoint.contract, place.plans(used, checkpoint)[place.index]) for place in places]
    return [vision_interface(checkpoint.contract), *declared]


@pytest.mark.parametrize("name", ["qwen3_vl_8b", "granite_vision_4_1_4b"])
@pytest.mark.parametrize("count", COUNTS)
def test_every_stage_takes_what_the_one_before_sends(tmp_path: Path, count: int, name: str) -> None:
    stages = stage_names(count)
    write_repository(tmp_path, stages)
    devices = ",".join(f"{stage}=cuda:{index}" for index, stage in enumerate(stages))
    declared = interfaces(tmp_path, stages, settings(name, devices=devices))
    own = {"image_grid_thw", "image_tokens", "stage_info"}  # for the orchestrator
    for before, after in pairwise(declared):
        sent = {spec.name: spec for spec in before.outputs if spec.name not in own}
        taken = {spec.name: spec for spec in after.inputs if spec.name in sent}
        assert taken == sent
    assert "next_ids" in {spec.name for spec in declared[-1].outputs}
    assert "input_ids" in {spec.name for spec in declared[1].inputs}


@pytest.mark.parametrize("count", COUNTS)
def test_orchestrator_calls_the_stages_in_their_order(tmp_path: Path, count: int) -> None:
    write_repository(tmp_path, stage_names(count))
    assert parameters(tmp_path, ORCHESTRATOR)["language_stages"] == ",".join(stage_names(count))


@pytest.mark.parametrize("count", COUNTS)
def test_every_stage_takes_its_inputs_where_they_are(tmp_path: Path, count: int) -> None:
    write_repository(tmp_path, stage_names(count))
    stages = [name for name in model_names(stage_names(count)) if name != ORCHESTRATOR]
    assert {parameters(tmp_path, name)["FORCE_CPU_ONLY_INPUT_TENSORS"] for name in stages} == {"no"}


@pytest.mark.parametrize(("count", "pipelines"), [(1, 2), (2, 2), (4, 8)])
def test_every_stage_of_every_pipeline_finds_its_place(tmp_path: Path, count: int, pipelines: int) -> None:
    write_repository(tmp_path, stage_names(count), pipelines)
    names = model_names(stage_names(count), pipelines)
    assert {path.name for path in tmp_path.iterdir()} == set(names)
    assert len(names) == pipelines * (count + 1) + 1
    assert pipelines_of(tmp_path) == Pipelines.parse(parameters(tmp_path, ORCHESTRATOR))
    written = pipelines_of(tmp_path)
    assert written == Pipelines(stage_names(count), pipelines)
    for number, stages in enumerate(written.languages):
        for index, name in enumerate(stages):
            assert StagePlace.parse(parameters(tmp_path, name)) == StagePlace(written, number, index)
    assert files(tmp_path / written.encoders[-1]) == files(COMMITTED / "vision_encoder")


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"pipelines": "0"}, "parameter 'pipelines' is '0'; allowed: a whole number from 1 to 8"),
        ({"pipelines": "two"}, "parameter 'pipelines' is 'two'"),
        ({"language_stages": "a,a"}, "'language_stages' must list the language models, each once"),
        ({"language_stage": "b_p3", "pipelines": "2"}, "'language_stage' is 'b_p3'; allowed: one of a, b, a_p2, b_p2"),
    ],
)
def test_ill_formed_parameters_are_refused(values: dict[str, str], complaint: str) -> None:
    given = {"language_stages": "a,b", "language_stage": "a", **values}
    with pytest.raises(SettingsError, match=complaint):
        StagePlace.parse(given)


def test_device_for_a_model_of_another_repository_is_refused(tmp_path: Path) -> None:
    write_repository(tmp_path, stage_names(3))
    used = settings("qwen3_vl_8b", devices="vision_encoder=cuda:0,language_late=cuda:1")
    with pytest.raises(SettingsError, match=r"names language_late, .* allowed: vision_encoder, language_0, language_1"):
        interfaces(tmp_path, stage_names(3), used)
