"""Where the benchmarks write, and the script that starts perf_analyzer wherever it is called from."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench import cpu, evaluate, perf
from bench.serving import PROJECT
from bench.tools import write_wrapper


@pytest.mark.parametrize("parse", [cpu._parse, evaluate._parse, perf._parse])
def test_results_go_to_the_build_folder_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, parse: Callable[[], Any]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench"])
    assert parse().output.relative_to(PROJECT).parts[0] == "build"
    monkeypatch.setattr(sys, "argv", ["bench", "--output", "bench/results"])
    assert parse().output == Path("bench/results")


@pytest.mark.parametrize("own", [None, "/own libraries"])
def test_wrapper_starts_the_program_with_its_libraries(tmp_path: Path, own: str | None) -> None:
    folder = tmp_path / "the cache" / "tool-1"
    folder.mkdir(parents=True)
    program = folder / "tool"
    program.write_text('#!/bin/sh\nprintf "%s|%s|%s" "$LD_LIBRARY_PATH" "$1" "$2"\n')
    program.chmod(0o755)
    wrapper = write_wrapper(folder.parent / "tool", program, folder / "lib")
    environment = {**os.environ, **({"LD_LIBRARY_PATH": own} if own else {})}
    environment = environment if own else {key: value for key, value in os.environ.items() if key != "LD_LIBRARY_PATH"}
    link = tmp_path / "link"
    link.symlink_to(wrapper)
    for path in (os.path.relpath(wrapper, tmp_path), str(link)):
        printed = subprocess.run(
            [f"./{path}" if path[0] != "/" else path, "a b", "c"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            check=True,
        )
        libraries, *words = printed.stdout.decode().split("|")
        assert libraries.split(":") == [str(folder / "lib"), *([own] if own else [])]
        assert words == ["a b", "c"]
