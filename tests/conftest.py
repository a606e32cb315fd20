"""Session-wide preparation: no network, one compute thread, and the tiny checkpoints that many tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six decoder layers, three deepstack levels, fp32."""
    from tests.support.tiny import write_checkpoint  # transformers is slow to import, and many tests do without

    return write_checkpoint(tmp_path_factory.mktemp("checkpoints") / "fp32")


@pytest.fixture(scope="session")
def bf16_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in bfloat16, with a tied head."""
    from tests.support.tiny import TinyShape, write_checkpoint

    shape = TinyShape(dtype=torch.bfloat16, tied=True)
    return write_checkpoint(tmp_path_factory.mktemp("checkpoints") / "bf16", shape)
