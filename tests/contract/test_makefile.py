"""What the Makefile hands on: which checkpoint the targets take."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
DEMO = "demo/checkpoints/qwen3_vl_digits"


def commands(target: str, *words: str, **variables: str) -> str:
    """What `make` would run."""
    environment = {name: text for name, text in os.environ.items() if not name.startswith("DEEPSTACK_")} | variables
    command = ["make", "--dry-run", "--no-print-directory", target, *words]
    done = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, check=True, text=True)
    return done.stdout


@pytest.mark.parametrize("target", ["serve", "demo", "perf", "evaluate", "audit"])
def test_checkpoint_of_the_environment_is_taken(target: str) -> None:
    assert DEMO in commands(target)
    assert "/models/x" in commands(target, DEEPSTACK_CHECKPOINT="/models/x")
    assert DEMO not in commands(target, DEEPSTACK_CHECKPOINT="/models/x")


def test_command_line_wins_over_the_environment() -> None:
    assert "/models/y" in commands("serve", "CHECKPOINT=/models/y", DEEPSTACK_CHECKPOINT="/models/x")


def test_a_settings_file_keeps_its_checkpoint_unless_another_one_is_asked_for() -> None:
    file = {"DEEPSTACK_SETTINGS_FILE": "/settings.toml"}
    assert "DEEPSTACK_CHECKPOINT" not in commands("serve", **file)
    assert "DEEPSTACK_CHECKPOINT=/models/x" in commands("serve", "CHECKPOINT=/models/x", **file)
    assert "DEEPSTACK_CHECKPOINT=/models/x" in commands("serve", DEEPSTACK_CHECKPOINT="/models/x", **file)
    assert f"DEEPSTACK_CHECKPOINT={DEMO}" in commands("serve", "FAMILY=qwen", **file)
