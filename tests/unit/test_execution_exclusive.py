"""Compiling on one GPU is one process's at a time; a folder that cannot be used is refused by its setting."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from deepstack_serving.errors import SettingsError
from deepstack_serving.execution.exclusive import exclusive

CODE = "code"


def test_the_second_waits_for_the_first(tmp_path: Path) -> None:
    order: list[str] = []
    begun = threading.Event()

    def second() -> None:
        begun.set()
        with exclusive(tmp_path / "cache", "cuda:0", "other code"):
            order.append("second")

    thread = threading.Thread(target=second)
    with exclusive(tmp_path / "cache", "cuda:0", CODE):
        thread.start()
        begun.wait(60)
        thread.join(0.2)
        order.append("first")
    thread.join(60)
    assert order == ["first", "second"]


def test_another_device_does_not_wait(tmp_path: Path) -> None:
    with exclusive(tmp_path, "cuda:0", CODE), exclusive(tmp_path, "cuda:1", CODE):
        pass


def test_its_turn_ends_with_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="failed"), exclusive(tmp_path, "cuda:0", CODE):
        raise ValueError("failed")
    with exclusive(tmp_path, "cuda:0", CODE):
        pass


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(SettingsError, match=r"'compile_cache_folder' is .*'compile' to 'off'"),
        exclusive(tmp_path / "file" / "cache", "cuda:0", CODE),
    ):
        pass


def test_nobody_waits_with_code_that_was_compiled(tmp_path: Path) -> None:
    with exclusive(tmp_path, "cuda:0", CODE):
        pass
    done = threading.Event()

    def second() -> None:
        with exclusive(tmp_path, "cuda:0", CODE):
            done.set()

    thread = threading.Thread(target=second)
    with exclusive(tmp_path, "cuda:0", "other code"):
        thread.start()
        assert done.wait(60)
    thread.join(60)


def test_compiling_that_failed_leaves_no_mark(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="failed"), exclusive(tmp_path, "cuda:0", CODE):
        raise ValueError("failed")
    assert not list(tmp_path.glob("*.compiled"))
