"""The command `deepstack repository`: writes a model repository and says how to start it."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from deepstack_serving.command_line import add_stage_arguments, check_split, refusing
from deepstack_serving.errors import SettingsError
from deepstack_serving.pipelines import MAX_PIPELINES, Pipelines
from deepstack_serving.repository import is_model, stage_names, write_repository
from deepstack_serving.settings import PREFIX


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the `deepstack` command line."""
    parser = subparsers.add_parser("repository", help="write a model repository with any number of language stages")
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    add_stage_arguments(parser)
    parser.add_argument(
        "--pipelines",
        type=int,
        choices=range(1, MAX_PIPELINES + 1),
        default=1,
        metavar="N",
        help=f"encoders and language stages that serve requests of their own, 1 to {MAX_PIPELINES} (%(default)s)",
    )
    parser.add_argument("--force", action="store_true", help="replace the models of an earlier repository")
    parser.set_defaults(run=refusing(run))


def run(arguments: argparse.Namespace) -> int:
    """Exit code 0, or SettingsError when the folder or the split cannot be used; then nothing is written."""
    folder, pipelines = arguments.folder, Pipelines(stage_names(arguments.stages), arguments.pipelines)
    check_split(arguments)
    _clear(folder, arguments.force)
    write_repository(folder, pipelines.stages, pipelines.count)
    sys.stdout.write(_instructions(folder, pipelines, arguments.split))
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


def _devices(pipelines: Pipelines) -> str:
    """A GPU for each language stage, its encoder with the first. Several pipelines take the same GPUs, each from the
    next one on, so that every GPU has as much to do.
    """
    placed = []
    for number, (encoder, stages) in enumerate(pipelines.members):
        gpus = [(number + index) % max(len(stages), pipelines.count) for index in range(len(stages))]
        placed += [f"{name}=cuda:{gpu}" for name, gpu in zip((encoder, *stages), (gpus[0], *gpus), strict=True)]
    return ",".join(placed)


def _instructions(folder: Path, pipelines: Pipelines, points: tuple[int, ...] | None) -> str:
    split = "balanced" if points is None else ",".join(map(str, points))
    devices = _devices(pipelines)
    settings = {"split_points": split, "devices": devices}
    flags = "".join(f" \\\n      --setting {key}={value}" for key, value in settings.items())
    variables = "".join(f"    {PREFIX}{key.upper()}={value}\n" for key, value in settings.items())
    return (
        f"wrote {', '.join(pipelines.models)} to {folder}\n\n"
        "Serve a checkpoint with it. The devices are those of one GPU per language stage; without this setting all "
        "stages\nshare the first GPU, or the CPU where there is none.\n\n"
        f"    deepstack serve --model-repository {folder} --checkpoint DIR{flags}\n\n"
        f"For a server of your own set the same as\n\n    {PREFIX}CHECKPOINT=DIR\n{variables}\n"
        f"and see where a checkpoint is split best by: deepstack plan DIR --stages {len(pipelines.stages)}\n"
    )
