"""The container's files agree with the project: versions, model names, settings, and what is safe to run."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from packaging.requirements import Requirement

from deepstack_serving.embedded import ServerOptions
from deepstack_serving.settings import PREFIX, RULES

PROJECT = Path(__file__).resolve().parents[2]
OWN_PACKAGES = {"deepstack-client", "deepstack-serving"}


def instructions() -> list[tuple[str, str]]:
    text = (PROJECT / "docker" / "Dockerfile").read_text()
    without_comments = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    lines = without_comments.replace("\\\n", " ").splitlines()
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in lines if line.strip())]


def arguments_of(name: str) -> list[str]:
    return [rest for instruction, rest in instructions() if instruction == name]


def pins() -> dict[str, str]:
    found = re.findall(r'"([\w-]+)(?:\[[\w,]+\])?==([\w.]+)"', " ".join(arguments_of("RUN")))
    return dict(found)


def requirements() -> list[Requirement]:
    files = (PROJECT / "pyproject.toml", PROJECT / "client" / "pyproject.toml")
    listed = [item for file in files for item in tomllib.loads(file.read_text())["project"]["dependencies"]]
    return [wanted for wanted in map(Requirement, listed) if wanted.name not in OWN_PACKAGES]


def server_flags(name: str) -> list[str]:
    flags = json.loads(arguments_of("ENTRYPOINT")[-1])
    return [flag.partition("=")[2] for flag in flags if flag.startswith(f"--{name}=")]


def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((PROJECT / "docker" / "compose.yaml").read_text())
    return loaded


def test_base_image_is_a_pinned_triton_release() -> None:
    assert all(re.fullmatch(r"nvcr\.io/nvidia/tritonserver:\d\d\.\d\d-py3", image) for image in arguments_of("FROM"))


@pytest.mark.parametrize("wanted", requirements(), ids=lambda wanted: str(wanted.name))
def test_every_dependency_is_pinned_within_its_range(wanted: Requirement) -> None:
    assert wanted.specifier.contains(pins()[wanted.name])


def test_named_models_are_those_of_the_repository() -> None:
    folders = [folder.name for folder in (PROJECT / "model_repository").iterdir() if folder.is_dir()]
    assert sorted(server_flags("load-model")) == sorted(folders)


def test_only_named_models_are_loaded() -> None:
    assert server_flags("model-control-mode") == ["explicit"]


def test_server_does_not_run_as_root() -> None:
    user = arguments_of("USER")[-1].partition(":")[0]
    assert int(user) > 0


@pytest.mark.parametrize("path", ["/v2/health/ready", "/v2/models/orchestrator/ready"])
def test_health_check_asks_server_and_orchestrator(path: str) -> None:
    (check,) = arguments_of("HEALTHCHECK")
    assert f"http://127.0.0.1:8000{path}" in json.loads(check[check.index("[") :])


def test_copied_paths_exist() -> None:
    sources = [source for line in arguments_of("COPY") for source in line.split()[:-1]]
    assert [source for source in sources if not (PROJECT / source).exists()] == []


def test_copied_paths_reach_the_builder() -> None:
    sources = {source for line in arguments_of("COPY") for source in line.split()[:-1]}
    ignore = (PROJECT / ".dockerignore").read_text().splitlines()
    assert sources == {line.removeprefix("!") for line in ignore if line.startswith("!")}


def test_settings_of_the_container_are_known() -> None:
    in_image = re.findall(r"\b(DEEPSTACK_\w+)=", " ".join(arguments_of("ENV")))
    in_services = [name for service in compose()["services"].values() for name in service.get("environment", {})]
    given = {name.removeprefix(PREFIX).lower() for name in [*in_image, *in_services] if name.startswith(PREFIX)}
    assert {"checkpoint"} <= given <= set(RULES)


def test_only_the_gpu_service_reserves_a_gpu() -> None:
    reserved = {name: "deploy" in service for name, service in compose()["services"].items()}
    assert reserved == {"gpu": True, "cpu": False}


def test_gpu_service_has_the_memory_pools_of_the_embedded_server() -> None:
    flags = [flag.partition("=")[2].split(":") for flag in compose()["services"]["gpu"]["command"]]
    assert [(int(gpu), int(size)) for gpu, size in flags] == [
        (gpu, ServerOptions().cuda_memory_pool_bytes) for gpu in range(8)
    ]


def test_stopping_waits_longer_than_the_server_drains() -> None:
    grace = {int(service["stop_grace_period"].removesuffix("s")) for service in compose()["services"].values()}
    assert min(grace) > int(server_flags("exit-timeout-secs")[0])


def test_checkpoint_is_mounted_where_the_image_looks_for_it() -> None:
    image_settings = dict(re.findall(r"\b(DEEPSTACK_\w+)=(\S+)", " ".join(arguments_of("ENV"))))
    for service in compose()["services"].values():
        targets = [volume["target"] for volume in service["volumes"] if volume.get("read_only")]
        assert targets == [image_settings["DEEPSTACK_CHECKPOINT"]]
