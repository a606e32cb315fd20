"""Makes a folder packed for a GPU host smaller: `python -m bench.gpu.shrink FOLDER` puts its wheels into one archive.

Wheels are compressed file by file; stored and compressed together they take about half. `run_on_host.sh` unpacks them.
"""

from __future__ import annotations

import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ARCHIVE = "wheels.tar.xz"


def shrink(folder: Path) -> Path:
    """Replaces the folder's wheels by one archive of the same wheels, their files stored."""
    wheels = sorted(folder.glob("*.whl"))
    with tempfile.TemporaryDirectory() as scratch, tarfile.open(folder / ARCHIVE, "w:xz") as archive:
        for wheel in wheels:
            stored = Path(scratch) / wheel.name
            with zipfile.ZipFile(wheel) as packed, zipfile.ZipFile(stored, "w", zipfile.ZIP_STORED) as unpacked:
                for item in packed.infolist():
                    unpacked.writestr(item, packed.read(item), zipfile.ZIP_STORED)
            archive.add(stored, wheel.name)
    for wheel in wheels:
        wheel.unlink()
    return folder / ARCHIVE


if __name__ == "__main__":
    shrink(Path(sys.argv[1]))
