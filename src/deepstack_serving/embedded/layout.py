"""Finds the server inside the `nvidia-pytriton` wheel and lays out what it needs to run this interpreter's packages.

The wheel keeps one Python stub per Python version away from the Python backend, and its libraries in a folder of their
own. A private backend folder links the two together. Everything that can be known to fail is checked before the start.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from deepstack_serving.embedded.failures import MissingLibraryError, UnsupportedEnvironmentError

_WHEEL = "nvidia-pytriton"
_INSTALL_HINT = "run: pip install 'deepstack-serving[embedded]'"
_STUB_NAME = "triton_python_backend_stub"
_NOT_FOUND = re.compile(r"^\s*(?P<library>\S+) => not found", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Wheel:
    """Where the parts of the server lie."""

    executable: Path
    python_backend: Path
    stub: Path
    libraries: Path


def find_wheel(server_folder: Path | None = None) -> Wheel:
    """The installed server with the stub for the running Python, or an error that says what to do.

    With `server_folder`, the parts unpacked there: bin/tritonserver, libs and backends/python with the stub in it.
    """
    _check_platform(sys.platform, platform.machine())
    if server_folder is not None:
        return _unpacked(server_folder.absolute())
    packages = _wheel_location()
    _check_numpy(metadata.version("numpy"))
    root = packages / "pytriton" / "tritonserver"
    return Wheel(
        executable=root / "bin" / "tritonserver",
        python_backend=root / "backends" / "python",
        stub=_stub_for(root / "python_backend_stubs", f"{sys.version_info.major}.{sys.version_info.minor}"),
        libraries=packages / "nvidia_pytriton.libs",
    )


def lay_out_backends(wheel: Wheel, run_directory: Path) -> Path:
    """A backend folder in the run directory whose Python backend has its stub beside it."""
    backends = run_directory / "backends"
    python_backend = backends / "python"
    python_backend.mkdir(parents=True, exist_ok=True)
    for source in (*wheel.python_backend.glob("*.so"), *wheel.python_backend.glob("*.py"), wheel.stub):
        link = python_backend / source.name
        link.unlink(missing_ok=True)
        link.symlink_to(source)
    return backends


# How long a stage's OpenMP threads spin after each operation: through the gaps between operations (waking one up costs
# more than many of them take), but not on and on, on the cores that the next stage needs. Read when torch is loaded.
_OPENMP = {"GOMP_SPINCOUNT": "100000"}


def server_environment(wheel: Wheel, extra: Mapping[str, str]) -> dict[str, str]:
    """The server's environment: this process's own, made to find the wheel's libraries and the running interpreter.

    The stub embeds libpython, which takes the first `python3` on PATH for itself and so finds the virtual environment
    (or the system's packages, if there is none) that this process runs in.
    """
    environment = {**_OPENMP, **os.environ, **extra}
    environment["PATH"] = _joined(str(Path(sys.executable).parent), environment.get("PATH", os.defpath))
    environment["LD_LIBRARY_PATH"] = _joined(
        str(wheel.libraries), *_own_python_library(), environment.get("LD_LIBRARY_PATH", "")
    )
    return environment


def check_libraries(wheel: Wheel, environment: Mapping[str, str]) -> None:
    """Ask the dynamic loader, without running anything, whether the server and the stub find all their libraries."""
    traced = {**environment, "LD_TRACE_LOADED_OBJECTS": "1"}
    for program in (wheel.executable, wheel.stub):
        listing = subprocess.run([program], env=traced, capture_output=True, text=True, check=False).stdout
        missing = _NOT_FOUND.findall(listing)
        if missing:
            raise MissingLibraryError(missing_library_text(missing))


def count_gpus(devices: Path = Path("/dev")) -> int:
    """How many NVIDIA GPUs this machine or container has. The server ignores flags for those that it does not see."""
    return len(list(devices.glob("nvidia[0-9]*")))


def missing_library_text(libraries: list[str]) -> str:
    """Names the missing libraries and, for libpython, the ways to get it."""
    text = f"the server's Python stub needs {', '.join(libraries)}, which is not on this machine"
    version = next((match[1] for name in libraries if (match := re.match(r"libpython(\d+\.\d+)\.so", name))), None)
    if version is None:
        return f"{text}; install the package of your system that holds it"
    return (
        f"{text}; on Debian and Ubuntu: apt-get install libpython{version}; with pyenv: reinstall {version} with "
        f"PYTHON_CONFIGURE_OPTS=--enable-shared; with conda: use the environment's own python{version}"
    )


def _unpacked(folder: Path) -> Wheel:
    backend = folder / "backends" / "python"
    parts = Wheel(folder / "bin" / "tritonserver", backend, backend / _STUB_NAME, folder / "libs")
    for path in (parts.executable, parts.stub, parts.libraries):
        if not path.exists():
            raise UnsupportedEnvironmentError(f"{path} is not there, so {folder} holds no unpacked server")
    _check_numpy(metadata.version("numpy"))
    return parts


def _check_platform(system: str, machine: str) -> None:
    if (system, machine) != ("linux", "x86_64"):
        raise UnsupportedEnvironmentError(
            f"the embedded server exists for Linux on x86-64 only, not for {system} on {machine}; "
            "use the container in docker/ there"
        )


def _check_numpy(version: str) -> None:
    if int(version.partition(".")[0]) >= 2:
        raise UnsupportedEnvironmentError(
            f"the embedded server's Python stub needs numpy below 2, found {version}; {_INSTALL_HINT}"
        )


def _wheel_location() -> Path:
    try:
        return Path(str(metadata.distribution(_WHEEL).locate_file("")))
    except metadata.PackageNotFoundError as error:
        raise UnsupportedEnvironmentError(f"the package {_WHEEL} is not installed; {_INSTALL_HINT}") from error


def _stub_for(stubs: Path, version: str) -> Path:
    stub = stubs / version / _STUB_NAME
    if not stub.is_file():
        known = ", ".join(sorted((path.name for path in stubs.iterdir()), key=lambda name: int(name.split(".")[1])))
        raise UnsupportedEnvironmentError(f"{_WHEEL} has no stub for Python {version}; it has stubs for {known}")
    return stub


def _own_python_library() -> list[str]:
    """The folder of the running interpreter's shared libpython, if it has one."""
    folder, name = sysconfig.get_config_var("LIBDIR"), sysconfig.get_config_var("INSTSONAME")
    return [folder] if folder and name and Path(folder, name).is_file() else []


def _joined(*parts: str) -> str:
    return os.pathsep.join(part for part in parts if part)
