"""Compiling on one GPU is one process's at a time; a folder that cannot be used is refused by its setting."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from deepstack_serving.errors import SettingsError
from deepstack_serving.execution.exclusive import exclusive


def test_the_second_waits_for_the_first(tmp_path: Path) -> None:
    order: list[str] = []
    begun = threading.Event()

    def second() -> None:
        begun.set()
        with exclusive(tmp_path / "cache", "cuda:0"):
            order.append("second")

    thread = threading.Thread(target=second)
    with exclusive(tmp_path / "cache", "cuda:0"):
        thread.start()
        begun.wait(60)
        thread.join(0.2)
        order.append("first")
    thread.join(60)
    assert order == ["first", "second"]


def test_another_device_does_not_wait(tmp_path: Path) -> None:
    with exclusive(tmp_path, "cuda:0"), exclusive(tmp_path, "cuda:1"):
        pass


def test_its_turn_ends_with_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="failed"), exclusive(tmp_path, "cuda:0"):
        raise ValueError("failed")
    with exclusive(tmp_path, "cuda:0"):
        pass


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(SettingsError, match=r"'compile_cache_folder' is .*'compile' to 'off'"),
        exclusive(tmp_path / "file" / "cache", "cuda:0"),
    ):
        pass
