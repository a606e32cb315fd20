"""The command `deepstack repository`: writes a model repository and says how to start it."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from deepstack_serving.command_line import add_stage_arguments, check_split, refusing
from deepstack_serving.errors import SettingsError
from deepstack_serving.repository import is_model, model_names, stage_names, write_repository
from deepstack_serving.settings import PREFIX
from deepstack_serving.wire import ORCHESTRATOR


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the `deepstack` command line."""
    parser = subparsers.add_parser("repository", help="write a model repository with any number of language stages")
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    add_stage_arguments(parser)
    parser.add_argument("--force", action="store_true", help="replace the models of an earlier repository")
    parser.set_defaults(run=refusing(run))


def run(arguments: argparse.Namespace) -> int:
    """Exit code 0, or SettingsError when the folder or the split cannot be used; then nothing is written."""
    folder, stages = arguments.folder, stage_names(arguments.stages)
    check_split(arguments)
    _clear(folder, arguments.force)
    write_repository(folder, stages)
    sys.stdout.write(_instructions(folder, stages, arguments.split))
    return 0


def _clear(folder: Path, force: bool) -> None:
    """Make room. Triton takes every folder of a repository for a model, so nothing else may stay in it."""
    if folder.exists() and not folder.is_dir():
        raise SettingsError(f"{folder} is not a folder")
    content = sorted(folder.iterdir()) if folder.exists() else []
    if content and not force:
        raise SettingsError(f"{folder} is not empty; name another folder, or --force to replace the models in it")
    foreign = [path.name for path in content if not is_model(path)]
    if foreign:
        raise SettingsError(f"{folder} holds {', '.join(foreign)}, which no such command wrote; nothing was replaced")
    for path in content:
        shutil.rmtree(path)


def _instructions(folder: Path, stages: Sequence[str], points: tuple[int, ...] | None) -> str:
    split = "balanced" if points is None else ",".join(map(str, points))
    placed = [name for name in model_names(stages) if name != ORCHESTRATOR]
    devices = ",".join(f"{name}=cuda:{max(index - 1, 0)}" for index, name in enumerate(placed))
    settings = {"split_points": split, "devices": devices}
    flags = "".join(f" \\\n      --setting {key}={value}" for key, value in settings.items())
    variables = "".join(f"    {PREFIX}{key.upper()}={value}\n" for key, value in settings.items())
    return (
        f"wrote {', '.join(model_names(stages))} to {folder}\n\n"
        "Serve a checkpoint with it. The devices are those of one GPU per language stage; without this setting all "
        "stages\nshare the first GPU, or the CPU where there is none.\n\n"
        f"    deepstack serve --model-repository {folder} --checkpoint DIR{flags}\n\n"
        f"For a server of your own set the same as\n\n    {PREFIX}CHECKPOINT=DIR\n{variables}\n"
        f"and see where a checkpoint is split best by: deepstack plan DIR --stages {len(stages)}\n"
    )
