"""Fetches the load generators into the cache folder, without touching the environment that the server runs in.

`python -m bench.tools` fetches perf_analyzer alone; `build/bench/perf_analyzer` then starts it.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.failures import BenchError
from bench.serving import CACHE, say
from deepstack_serving.embedded.layout import find_wheel

PERF_ANALYZER_VERSION = "2.48.0"
AIPERF_VERSION = "0.13.0"
_BASE64_LIBRARY = "libb64.so.0d"
_BASE64_PACKAGE = "libb64-0d"
_CUDA_LIBRARY = "libcudart.so.12"
_WRAPPER = """#!/bin/sh
folder=$(dirname "$(readlink -f "$0")")
export LD_LIBRARY_PATH="$folder"/{libraries}"${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"
exec "$folder"/{program} "$@"
"""


@dataclass(frozen=True)
class Tool:
    """A program and the variables that it needs beside this process's own."""

    program: Path
    environment: Mapping[str, str]

    def run(self, arguments: Sequence[str], folder: Path, timeout_s: float) -> str:
        """Its output, both streams. Raises BenchError with the output's end when it fails."""
        return run_command([str(self.program), *arguments], {**os.environ, **self.environment}, timeout_s, folder)


def perf_analyzer(cache: Path) -> Tool:
    """The program out of tritonclient's Linux wheel, with the two libraries that it misses on a bare machine."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise BenchError("perf_analyzer ships for Linux on x86-64 only")
    folder = cache / f"perf_analyzer-{PERF_ANALYZER_VERSION}"
    program, libraries = folder / "perf_analyzer", folder / "lib"
    libraries.mkdir(parents=True, exist_ok=True)
    if not program.exists():
        _download_perf_analyzer(program)
    if not (libraries / _BASE64_LIBRARY).exists() and not _loads(_BASE64_LIBRARY):
        _download_base64_library(libraries)
    if not (libraries / _CUDA_LIBRARY).exists() and not _loads(_CUDA_LIBRARY):
        _link_cuda_library(libraries)
    return Tool(write_wrapper(cache / program.name, program, libraries), {})


def write_wrapper(wrapper: Path, program: Path, libraries: Path) -> Path:
    """A script that starts the program with its libraries, from any working folder; both lie beneath its own."""
    inside = [shlex.quote(str(path.relative_to(wrapper.parent))) for path in (libraries, program)]
    partial = wrapper.with_suffix(".partial")
    partial.write_text(_WRAPPER.format(libraries=inside[0], program=inside[1]))
    partial.chmod(0o755)
    partial.replace(wrapper)
    return wrapper


def aiperf(cache: Path) -> Tool:
    """AIPerf in a virtual environment of its own."""
    folder = cache / f"aiperf-{AIPERF_VERSION}"
    program, complete = folder / "bin" / "aiperf", folder / "complete"
    if not complete.exists():
        say(f"installing aiperf {AIPERF_VERSION} into {folder} (about a minute, once) ...")
        shutil.rmtree(folder, ignore_errors=True)
        run_command([sys.executable, "-m", "venv", str(folder)])
        run_command([str(folder / "bin" / "pip"), "install", "--quiet", f"aiperf=={AIPERF_VERSION}"], timeout_s=1200)
        complete.touch()
    # AIPerf's offline mode takes a tokenizer folder for a name in the hub's cache; without it, it reads the folder.
    return Tool(program, {"HF_HUB_OFFLINE": "", "TRANSFORMERS_OFFLINE": ""})


def run_command(
    command: Sequence[str],
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 600.0,
    folder: Path | None = None,
) -> str:
    """Output of a command, both streams. Raises BenchError with the output's end when it fails."""
    try:
        done = subprocess.run(
            list(command),
            env=environment,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except FileNotFoundError as error:
        raise BenchError(f"{command[0]} is not on this machine") from error
    except subprocess.TimeoutExpired as error:
        raise BenchError(f"{Path(command[0]).name} did not end within {timeout_s:g} s") from error
    if done.returncode:
        tail = "\n".join(done.stdout.splitlines()[-25:])
        raise BenchError(f"{Path(command[0]).name} ended with status {done.returncode}:\n{tail}")
    return done.stdout


def _download_perf_analyzer(program: Path) -> None:
    say(f"fetching perf_analyzer {PERF_ANALYZER_VERSION} (14 MB, once) ...")
    with tempfile.TemporaryDirectory() as folder:
        package = f"tritonclient=={PERF_ANALYZER_VERSION}"
        options = ["--no-deps", "--only-binary=:all:", "--platform=manylinux1_x86_64", "--quiet"]
        run_command([sys.executable, "-m", "pip", "download", package, *options, "--dest", folder])
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
            member = next(name for name in wheel.namelist() if name.endswith("/bin/perf_analyzer"))
            partial = program.with_suffix(".partial")
            partial.write_bytes(wheel.read(member))
    partial.chmod(0o755)
    partial.rename(program)


def _download_base64_library(libraries: Path) -> None:
    """Unpack Debian's package beside the program: installing it would need root."""
    say(f"fetching {_BASE64_PACKAGE} ...")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            run_command(["apt-get", "download", _BASE64_PACKAGE], folder=folder)
            run_command(["dpkg", "-x", str(next(folder.glob("*.deb"))), str(folder / "files")])
            found = next((folder / "files").rglob(_BASE64_LIBRARY))
        except (BenchError, StopIteration) as error:
            advice = f"install the package {_BASE64_PACKAGE} of Debian or Ubuntu"
            raise BenchError(f"perf_analyzer needs {_BASE64_LIBRARY}; {advice}: {error}") from error
        shutil.copy(found, libraries / _BASE64_LIBRARY)


def _link_cuda_library(libraries: Path) -> None:
    found = sorted(find_wheel().libraries.glob("libcudart-*.so.12*"))
    if not found:
        raise BenchError(f"perf_analyzer needs {_CUDA_LIBRARY}, and the nvidia-pytriton wheel holds none")
    (libraries / _CUDA_LIBRARY).symlink_to(found[0])


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def main() -> int:
    """Exit code 1 with the reason on standard error when it is not to be had."""
    try:
        perf_analyzer(CACHE)
    except BenchError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
