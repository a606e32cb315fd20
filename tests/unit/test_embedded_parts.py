"""Small parts of the embedded server: ports, regions, flags, the server's words."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from deepstack_serving.embedded import ModelLoadError, Ports, ServerOptions
from deepstack_serving.embedded.control import Control, load_failure_reason, sum_of_metric
from deepstack_serving.embedded.layout import count_gpus
from deepstack_serving.embedded.options import server_arguments
from deepstack_serving.embedded.ports import choose_ports, connect_host, first_taken
from deepstack_serving.embedded.process import model_of_stub
from deepstack_serving.errors import UnavailableError
from deepstack_serving.regions import region_prefix, sweep_orphaned_regions, sweep_regions

LOCAL = "127.0.0.1"


@pytest.fixture
def ended_process_id() -> int:
    with subprocess.Popen([sys.executable, "-S", "-c", ""]) as process:
        process.wait()
    return process.pid


def region_of(folder: Path, prefix: str) -> Path:
    path = folder / f"{prefix}b03ab958-e3c9-4566-afbb-deba0ac03b96"
    path.write_bytes(b"")
    return path


def test_chosen_ports_are_all_different() -> None:
    assert len(set(choose_ports(LOCAL, Ports()).numbers())) == 3


def test_wanted_port_is_kept() -> None:
    assert choose_ports(LOCAL, Ports(grpc=4711)).grpc == 4711


def test_port_in_other_hands_is_found() -> None:
    with socket.create_server((LOCAL, 0)) as other:
        number = other.getsockname()[1]
        assert first_taken(LOCAL, Ports(metrics=number)) == number


def test_free_ports_are_not_taken() -> None:
    assert first_taken(LOCAL, choose_ports(LOCAL, Ports())) is None


def test_server_on_all_addresses_is_reached_on_the_local_one() -> None:
    assert connect_host("0.0.0.0") == LOCAL


def test_region_of_an_ended_server_is_swept(tmp_path: Path, ended_process_id: int) -> None:
    region = region_of(tmp_path, region_prefix(ended_process_id))
    assert sweep_orphaned_regions(tmp_path) == [region]
    assert not region.exists()


def test_region_of_a_living_process_stays(tmp_path: Path) -> None:
    region_of(tmp_path, region_prefix(1))
    assert not sweep_orphaned_regions(tmp_path)


@pytest.mark.parametrize("prefix", ["triton_python_backend_shm_region_", "deepstack_", "deepstack_1_"])
def test_region_of_somebody_else_stays(tmp_path: Path, prefix: str) -> None:
    region_of(tmp_path, prefix)
    assert not sweep_orphaned_regions(tmp_path)


def test_region_of_another_process_namespace_stays(tmp_path: Path, ended_process_id: int) -> None:
    region_of(tmp_path, f"deepstack_1_{ended_process_id}_")
    assert not sweep_orphaned_regions(tmp_path)


def test_sweep_of_one_server_leaves_those_of_others(tmp_path: Path) -> None:
    own, other = region_of(tmp_path, region_prefix(17)), region_of(tmp_path, region_prefix(171))
    assert sweep_regions(17, tmp_path) == [own]
    assert other.exists()


def test_flags_hold_the_backends_settings(tmp_path: Path) -> None:
    options = ServerOptions(thread_pool_size=7, shared_memory_bytes=8, shared_memory_growth_bytes=9)
    arguments = server_arguments(options, Ports(1, 2, 3), tmp_path, tmp_path, "id")
    settings = [flag.removeprefix("--backend-config=python,") for flag in arguments if "backend-config" in flag]
    assert settings == ["thread-pool-size=7", "shm-default-byte-size=8", "shm-growth-byte-size=9"]


def test_extra_flags_come_last(tmp_path: Path) -> None:
    options = ServerOptions(extra_arguments=("--cuda-memory-pool-byte-size=0:1",))
    assert server_arguments(options, Ports(), tmp_path, tmp_path, "id")[-1] == "--cuda-memory-pool-byte-size=0:1"


def test_every_gpu_gets_a_memory_pool(tmp_path: Path) -> None:
    arguments = server_arguments(ServerOptions(cuda_memory_pool_bytes=7), Ports(), tmp_path, tmp_path, "id", gpus=2)
    pools = [flag.partition("=")[2] for flag in arguments if flag.startswith("--cuda-memory-pool-byte-size")]
    assert pools == ["0:7", "1:7"]


def test_gpus_are_counted_by_their_device_files(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia3", "nvidiactl", "nvidia-uvm", "nvidia-caps", "null"):
        (tmp_path / name).touch()
    assert count_gpus(tmp_path) == 2


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "load failed for model 'm': version 1 is at UNAVAILABLE state: Internal: ValueError: a\n\nAt:\n  x(3)\n;\n",
            "ValueError: a",
        ),
        (
            "failed to load 'm', failed to poll from model repository",
            "failed to load 'm', failed to poll from model repository",
        ),
    ],
)
def test_reason_of_a_failed_load_is_the_models_own(text: str, reason: str) -> None:
    assert load_failure_reason(text) == reason


def test_failed_loads_are_all_named() -> None:
    assert str(ModelLoadError({"a": "x", "b": "y"})) == "model 'a' did not load: x; model 'b' did not load: y"


def test_metric_is_summed_over_its_labels() -> None:
    exposition = '# HELP active_requests running\nactive_requests{model="a"} 2\nactive_requests{model="b"} 3\n'
    assert sum_of_metric(exposition, "active_requests") == 5


def test_metric_with_a_longer_name_is_another_one() -> None:
    assert sum_of_metric("active_requests_total 4\n", "active_requests") is None


def test_server_that_does_not_answer_is_unavailable() -> None:
    number = choose_ports(LOCAL, Ports()).http
    with pytest.raises(UnavailableError, match=str(number)):
        Control(f"{LOCAL}:{number}", f"{LOCAL}:{number}").unload("model")


def test_stub_tells_its_model() -> None:
    assert model_of_stub(["/b/triton_python_backend_stub", "/repository/encoder/1/model.py", "region"]) == "encoder"


def test_other_programs_run_no_model() -> None:
    assert model_of_stub(["/bin/sh", "/repository/encoder/1/model.py"]) is None
