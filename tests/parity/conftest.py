"""What the parity tests compare with: transformers on the whole checkpoint, and this project with a single stage."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.asking import MIXED, Answer
from tests.support.reference import Reference
from tests.support.runs import Run, run


@pytest.fixture(scope="session")
def reference(checkpoint: Path) -> Reference:
    return Reference(checkpoint)


@pytest.fixture(scope="session")
def expected(reference: Reference) -> list[Answer]:
    """transformers' answers to MIXED."""
    return [reference.generate(ask) for ask in MIXED]


@pytest.fixture(scope="session")
def unsplit(checkpoint: Path) -> Run:
    return run(checkpoint, stages=1)
