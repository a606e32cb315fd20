"""The commands that pyproject.toml declares exist, and the client names the package for each of them."""

from __future__ import annotations

import argparse
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from deepstack_client.cli import main, plugins

PROJECT = Path(__file__).resolve().parents[2]
DECLARED = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["entry-points"][plugins.GROUP]


@pytest.mark.parametrize(("name", "value"), DECLARED.items())
def test_command_registers_itself_under_its_name(name: str, value: str) -> None:
    subparsers = argparse.ArgumentParser().add_subparsers()
    EntryPoint(name, value, plugins.GROUP).load()(subparsers)
    assert list(subparsers.choices) == [name]


@pytest.mark.parametrize("name", DECLARED)
def test_client_alone_says_what_to_install(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "any", "--words"], commands=[]) == 1
    assert "install deepstack-serving" in capsys.readouterr().err
