"""What a figure depends on beside the code: processor, memory, load, versions, and the memory of processes."""

from __future__ import annotations

import datetime
import os
import platform
import re
import shlex
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = ("torch", "triton", "transformers", "numpy", "nvidia-pytriton", "tritonclient", "deepstack-serving")
_KIBIBYTES_PER_MEBIBYTE = 1024


def describe(command: str) -> dict[str, Any]:
    """Date, hardware, versions and the command that repeats the run."""
    memory_kib = _field(Path("/proc/meminfo").read_text(), "MemTotal")
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command,
        "processor": processor_name(Path("/proc/cpuinfo").read_text()),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_kib / _KIBIBYTES_PER_MEBIBYTE**2, 1),
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
    }


def command_line(module: str) -> str:
    """The command of this process, as a user of the project types it."""
    return shlex.join(["python", "-m", module, *sys.argv[1:]])


def processor_name(cpuinfo: str) -> str:
    """The name with family and model: some hypervisors give a name that tells nothing."""
    values = {key: _text(cpuinfo, key) for key in ("model name", "cpu family", "model")}
    return f"{values['model name']} (family {values['cpu family']}, model {values['model']})"


def process_tree(process_id: int) -> list[int]:
    """The process and all its descendants."""
    children = Path(f"/proc/{process_id}/task/{process_id}/children").read_text().split()
    return [process_id, *(deeper for child in children for deeper in process_tree(int(child)))]


def memory_mib(process_ids: Iterable[int]) -> dict[str, float]:
    """Peak resident size, and the proportional size now, which counts shared pages once; sums over the processes."""
    ids = list(process_ids)
    peak = sum(_field(Path(f"/proc/{item}/status").read_text(), "VmHWM") for item in ids)
    proportional = sum(_field(Path(f"/proc/{item}/smaps_rollup").read_text(), "Pss") for item in ids)
    return {"peak_rss": round(peak / _KIBIBYTES_PER_MEBIBYTE), "pss": round(proportional / _KIBIBYTES_PER_MEBIBYTE)}


def _field(text: str, name: str) -> int:
    match = re.search(rf"^{re.escape(name)}:\s*(\d+) kB", text, re.MULTILINE)
    return int(match[1]) if match else 0


def _text(text: str, name: str) -> str:
    match = re.search(rf"^{re.escape(name)}\s*: (.*)$", text, re.MULTILINE)
    return match[1].strip() if match else "unknown"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
