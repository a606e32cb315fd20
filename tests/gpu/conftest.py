"""Tests that need a GPU: `make test-gpu`. Without one nothing here is collected.

Those with a server take the one of the installed wheel, or an unpacked one: `--triton-home FOLDER`, which holds
bin/tritonserver, libs and backends/python.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deepstack_serving.embedded import UnsupportedEnvironmentError
from deepstack_serving.embedded.layout import find_wheel
from tests.parity.conftest import bf16_checkpoint, checkpoint, parity_folder

__all__ = ["bf16_checkpoint", "checkpoint", "parity_folder"]

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]
torch.backends.cuda.matmul.allow_tf32 = False


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--triton-home", type=Path, default=None, metavar="FOLDER", help="an unpacked server")


@pytest.fixture(scope="session")
def server_folder(request: pytest.FixtureRequest) -> Path | None:
    """Where the server lies; None is the installed wheel. Tests that want it are skipped where there is neither."""
    folder: Path | None = request.config.getoption("--triton-home", default=None)
    try:
        find_wheel(folder)
    except UnsupportedEnvironmentError as error:
        pytest.skip(str(error))
    return folder
