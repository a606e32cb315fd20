"""Checks that come before a start of the embedded server: each refusal names its remedy."""

from __future__ import annotations

import dataclasses
import os
import platform
import sys
from importlib import metadata
from pathlib import Path

import pytest

from deepstack_serving.embedded import MissingLibraryError, UnsupportedEnvironmentError, layout
from deepstack_serving.embedded.layout import Wheel


def fake_wheel(root: Path) -> Wheel:
    """A wheel of empty files."""
    backend, stub = root / "wheel_backend", root / "triton_python_backend_stub"
    backend.mkdir()
    for path in (stub, backend / "libtriton_python.so", backend / "triton_python_backend_utils.py"):
        path.touch()
    return Wheel(executable=stub, python_backend=backend, stub=stub, libraries=root / "libraries")


@pytest.fixture
def stub_for_a_python_that_is_not_here(tmp_path: Path) -> Wheel:
    """The installed wheel with a stub that asks for the libpython of Python 3.99."""
    wheel = layout.find_wheel()
    stub = tmp_path / "stub"
    here, absent = f"libpython3.{sys.version_info.minor}.so".encode(), b"libpython3.99.so"
    stub.write_bytes(wheel.stub.read_bytes().replace(here, absent))
    stub.chmod(0o755)
    return dataclasses.replace(wheel, stub=stub)


@pytest.mark.parametrize(("system", "machine"), [("darwin", "x86_64"), ("linux", "aarch64"), ("win32", "AMD64")])
def test_platform_without_a_wheel_is_refused(monkeypatch: pytest.MonkeyPatch, system: str, machine: str) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    with pytest.raises(UnsupportedEnvironmentError, match="Linux on x86-64"):
        layout.find_wheel()


def test_missing_wheel_names_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "_WHEEL", "no-such-distribution")
    with pytest.raises(UnsupportedEnvironmentError, match=r"pip install 'deepstack-serving\[embedded\]'"):
        layout.find_wheel()


def test_numpy_2_is_refused_with_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: "2.1.3")
    with pytest.raises(UnsupportedEnvironmentError, match=r"numpy below 2, found 2\.1\.3"):
        layout.find_wheel()


def test_python_without_a_stub_is_refused_with_the_versions_that_have_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", type("Version", (), {"major": 3, "minor": 99}))
    with pytest.raises(UnsupportedEnvironmentError, match=r"3\.99.*3\.11, 3\.12"):
        layout.find_wheel()


def test_server_that_was_unpacked_somewhere_is_taken_from_there(tmp_path: Path) -> None:
    for name in ("bin/tritonserver", "backends/python/triton_python_backend_stub", "libs/lib.so"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    found = layout.find_wheel(tmp_path)
    assert (found.executable, found.libraries) == (tmp_path / "bin" / "tritonserver", tmp_path / "libs")
    assert found.stub.parent == found.python_backend == tmp_path / "backends" / "python"


def test_folder_without_an_unpacked_server_is_refused_with_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedEnvironmentError, match=r"bin/tritonserver is not there"):
        layout.find_wheel(tmp_path)


def test_missing_libpython_names_the_package(stub_for_a_python_that_is_not_here: Wheel) -> None:
    environment = layout.server_environment(stub_for_a_python_that_is_not_here, {})
    with pytest.raises(MissingLibraryError, match=r"libpython3\.99\.so\.1\.0.*apt-get install libpython3\.99;"):
        layout.check_libraries(stub_for_a_python_that_is_not_here, environment)


def test_another_missing_library_is_named() -> None:
    assert "libexample.so.1, which" in layout.missing_library_text(["libexample.so.1"])


def test_installed_wheel_has_all_libraries() -> None:
    wheel = layout.find_wheel()
    layout.check_libraries(wheel, layout.server_environment(wheel, {}))


def test_backend_folder_has_the_stub_beside_the_backend(tmp_path: Path) -> None:
    backends = layout.lay_out_backends(fake_wheel(tmp_path), tmp_path / "run")
    names = {path.name for path in (backends / "python").iterdir() if path.exists()}
    assert names == {"libtriton_python.so", "triton_python_backend_utils.py", "triton_python_backend_stub"}


def test_backend_folder_can_be_laid_out_again(tmp_path: Path) -> None:
    wheel = fake_wheel(tmp_path)
    assert layout.lay_out_backends(wheel, tmp_path / "run") == layout.lay_out_backends(wheel, tmp_path / "run")


def test_running_interpreter_is_first_on_the_path(tmp_path: Path) -> None:
    environment = layout.server_environment(fake_wheel(tmp_path), {"PATH": "/elsewhere"})
    assert environment["PATH"].split(os.pathsep) == [str(Path(sys.executable).parent), "/elsewhere"]


def test_wheels_libraries_are_first_on_the_library_path(tmp_path: Path) -> None:
    wheel = fake_wheel(tmp_path)
    environment = layout.server_environment(wheel, {"LD_LIBRARY_PATH": "/elsewhere"})
    folders = environment["LD_LIBRARY_PATH"].split(os.pathsep)
    assert (folders[0], folders[-1]) == (str(wheel.libraries), "/elsewhere")


def test_given_variables_reach_the_server(tmp_path: Path) -> None:
    assert (
        layout.server_environment(fake_wheel(tmp_path), {"DEEPSTACK_DTYPE": "float32"})["DEEPSTACK_DTYPE"] == "float32"
    )
