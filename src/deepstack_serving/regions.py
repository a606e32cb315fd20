"""Names of this project's shared-memory regions, and the sweep of those that a killed process left behind.

The Python backend names a region `<prefix><uuid>`, the orchestrator one `<prefix>exchange_<digits>`. The prefix carries
the owner's process id and the id of the namespace in which that number means something, so that a sweep removes only
regions of this project whose owner is certainly gone: a container that shares /dev/shm with the host never touches the
host's regions, nor the reverse.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

REGION_DIRECTORY = Path("/dev/shm")
_ENDED_STATES = ("Z", "X")
_REGION = re.compile(r"deepstack_(?P<namespace>\d+)_(?P<process>\d+)_.+")


def region_prefix(process_id: int) -> str:
    """The prefix of all regions of the process with this id."""
    return f"deepstack_{_process_namespace()}_{process_id}_"


def sweep_regions(process_id: int, directory: Path = REGION_DIRECTORY) -> list[Path]:
    """Remove the regions of one server, which must have ended."""
    return _remove(list(directory.glob(f"{region_prefix(process_id)}*")))


def sweep_orphaned_regions(directory: Path = REGION_DIRECTORY) -> list[Path]:
    """Remove the regions of this project whose owner is gone."""
    return _remove([path for path in directory.glob("deepstack_*") if is_orphaned(path.name)])


def is_orphaned(name: str) -> bool:
    """Whether the owner of a region of this name is certainly gone."""
    match = _REGION.fullmatch(name)
    if match is None or int(match["namespace"]) != _process_namespace():
        return False
    return _has_ended(int(match["process"]))


def _has_ended(process_id: int) -> bool:
    """Whether the process is gone or a zombie. A number that is in use again keeps the old regions, without harm."""
    try:
        status = Path("/proc", str(process_id), "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return status.rpartition(")")[2].split()[0] in _ENDED_STATES


def _remove(paths: list[Path]) -> list[Path]:
    removed = []
    for path in paths:
        # A region of another user stays; one that another sweep removed at the same time is gone already.
        with contextlib.suppress(PermissionError, FileNotFoundError):
            path.unlink()
            removed.append(path)
    return removed


def _process_namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino
