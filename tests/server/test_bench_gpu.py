"""The whole GPU benchmark on the tiny shape: the real server from unpacked parts, on the CPU, beside `generate`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from deepstack_serving.embedded.layout import find_wheel, lay_out_backends

PROJECT = Path(__file__).parents[2]
LIMIT_S = 300.0


def unpacked_server(folder: Path) -> Path:
    """The installed wheel's parts as they lie on a host that has them unpacked."""
    wheel = find_wheel()
    lay_out_backends(wheel, folder)
    (folder / "bin").symlink_to(wheel.executable.parent)
    (folder / "libs").symlink_to(wheel.libraries)
    return folder


def bench(output: Path, *arguments: str) -> dict[str, Any]:
    """Run the command; the one run of its results."""
    command = [sys.executable, "-m", "bench.h200", "--output", str(output), *arguments]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (found,) = json.loads(next(output.glob("*.json")).read_text())["runs"]
    return dict(found)


def test_tiny_shape_is_measured_through_the_whole_command(tmp_path: Path) -> None:
    options = ("--arms", "server,generate", "--modes", "eager", "--clients", "2", "--rounds", "1", "--samples", "1")
    server = ("--triton", str(unpacked_server(tmp_path / "triton")), "--tokens", "8", "--profile", "--stages", "1")
    folder = ("--checkpoints", str(tmp_path / "checkpoints"), "--limit-s", str(LIMIT_S - 30))

    run = bench(tmp_path / "out", "--shape", "tiny", *options, *server, *folder)

    phases = {arm["arm"]: {phase["phase"]: phase for phase in arm["phases"]} for arm in run["arms"]}
    assert [phase for arm in phases.values() for phase in arm.values() if "error" in phase] == []
    assert phases["server"]["image, 1 client"]["result"]["input_tokens"] == 64 + 66
    assert phases["server"]["image, 2 at once"]["result"]["input_tokens"] == [64 + 66]
    assert phases["server"]["text, 1 client"]["result"]["input_tokens"] == 128
    assert phases["generate eager"]["image, 1 client"]["result"]["input_tokens"] == 64 + 66
    decode = phases["server"]["profile of a decode step, text, 1 client"]["result"]["models"]
    assert decode["language"]["compute_infer"] > 0

    table = next((tmp_path / "out").glob("*.md")).read_text()
    assert "profile of a first token" in table and "1 language stage" in table
