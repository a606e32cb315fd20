"""Attention over pages: the GPU's kernels, run on the CPU by Triton's interpreter, against float64.

The interpreter has no bfloat16, and shows nothing of speed: tests/gpu runs the same cases compiled.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.paged import CASES, EDGES

PROJECT = Path(__file__).resolve().parents[2]
LARGEST_ERROR = {"float32": 1e-6, "float16": 1e-3}
NAMES = [
    f"{dtype}, {name}"
    for dtype in LARGEST_ERROR
    for name in CASES
    if dtype == "float32" or any(edge in name for edge in EDGES)
]

pytest.importorskip("triton", reason="the kernels are written in Triton's language")


@pytest.fixture(scope="module")
def interpreted() -> Any:
    """What one process, whose kernels are interpreted, makes of all cases."""
    command = [sys.executable, "-W", "error::RuntimeWarning", "-m", "tests.support.paged"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)


def test_all_cases_ran(interpreted: Any) -> None:
    assert list(interpreted["outcomes"]) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_case_equals_float64(interpreted: Any, name: str) -> None:
    outcome = interpreted["outcomes"][name]
    assert outcome["error"] < LARGEST_ERROR[name.partition(",")[0]]
    assert outcome["padding_is_zero"], "rows of padding give zeros"
    assert outcome["pool_is_right"], "new tokens are in their slots, and every other slot is as it was"


@pytest.mark.parametrize("name", ["decode batch", "mixed"])
def test_compiled_layer_equals_plain(interpreted: Any, name: str) -> None:
    assert interpreted["compiled"][name]
