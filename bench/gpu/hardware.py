"""The GPUs of the machine, as nvidia-smi tells of them; no CUDA context is made to ask."""

from __future__ import annotations

import os
import subprocess
from typing import Any

_FIELDS = ("index", "name", "memory.used", "memory.total", "driver_version", "clocks.sm", "temperature.gpu")
_LIMIT_S = 30.0


def gpus() -> list[dict[str, Any]]:
    """One record per GPU that this process may see, memory in MiB; none where there is no nvidia-smi or no GPU."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        command.append(f"--id={visible}")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return parse_gpus(done.stdout) if done.returncode == 0 else []


def parse_gpus(text: str) -> list[dict[str, Any]]:
    """From nvidia-smi's CSV, a line per GPU."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]
    return [
        {name: int(cell) if cell.isdigit() else cell for name, cell in zip(_FIELDS, row, strict=True)} for row in rows
    ]


def used_bytes() -> int:
    """Memory in use on all of them together."""
    return sum(int(gpu["memory.used"]) << 20 for gpu in gpus())
