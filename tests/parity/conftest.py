"""What the parity tests compare with: transformers on the whole checkpoint, and this project with a single stage.

The two checkpoints stand for every family in turn, unless a module or a test names the ones that it wants.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.asking import MIXED, Answer
from tests.support.reference import Reference
from tests.support.runs import Run, run
from tests.support.tiny import TinyShape, write_checkpoint
from tests.support.tiny_granite import TinyGraniteShape, write_granite_checkpoint
from tests.support.tiny_moe import TinyMoeShape

Writer = Callable[[Path, Any], Path]
WRITERS: dict[str, tuple[Writer, Any]] = {
    "qwen3_vl": (write_checkpoint, TinyShape()),
    "qwen3_vl_moe": (write_checkpoint, TinyMoeShape()),
    "granite4_vision": (write_granite_checkpoint, TinyGraniteShape()),
}


@pytest.fixture(scope="session")
def parity_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parity")


@pytest.fixture(scope="session", params=WRITERS)
def checkpoint(request: pytest.FixtureRequest, parity_folder: Path) -> Path:
    """fp32, with three deepstack levels in six layers, or seven in eight."""
    write, shape = WRITERS[request.param]
    return _written(parity_folder / request.param, write, shape)


@pytest.fixture(scope="session", params=WRITERS)
def bf16_checkpoint(request: pytest.FixtureRequest, parity_folder: Path) -> Path:
    """The same in bfloat16, with a tied head."""
    write, shape = WRITERS[request.param]
    return _written(parity_folder / f"{request.param}-bf16", write, replace(shape, dtype=torch.bfloat16, tied=True))


@pytest.fixture(scope="session")
def reference(checkpoint: Path) -> Reference:
    return _reference(checkpoint)


@pytest.fixture(scope="session")
def expected(checkpoint: Path) -> list[Answer]:
    """transformers' answers to MIXED."""
    return list(_expected(checkpoint))


@pytest.fixture(scope="session")
def unsplit(checkpoint: Path) -> Run:
    return run_unsplit(checkpoint)


# pytest builds a session's fixtures anew where the parameters alternate; these are made once for each checkpoint.


def _written(folder: Path, write: Writer, shape: Any) -> Path:
    return folder if folder.exists() else write(folder, shape)


@cache
def run_unsplit(checkpoint: Path) -> Run:
    return run(checkpoint, stages=1)


@cache
def _reference(checkpoint: Path) -> Reference:
    return Reference(checkpoint)


@cache
def _expected(checkpoint: Path) -> tuple[Answer, ...]:
    return tuple(_reference(checkpoint).generate(ask) for ask in MIXED)
