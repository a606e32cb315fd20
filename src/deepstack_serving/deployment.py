"""What a command serves on the embedded server: arguments to a repository, its models and the variables they read."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from deepstack_serving.embedded import EmbeddedServer, EmbeddedServerError, ProgressListener
from deepstack_serving.errors import UnavailableError
from deepstack_serving.repository import pipelines_of
from deepstack_serving.settings import FILE_VARIABLE, PREFIX, load_settings

_PROBE_TEXT = "Hello"
_FOLDER_NAME = "model_repository"


def add_deployment_arguments(parser: argparse.ArgumentParser) -> None:
    """`--checkpoint`, `--model-repository` and `--setting`, for `deployment_of`."""
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help=f"same as {PREFIX}CHECKPOINT")
    parser.add_argument(
        "--model-repository",
        type=Path,
        metavar="DIR",
        help=f"with any number of language stages; default: ./{_FOLDER_NAME}, or the project's",
    )
    parser.add_argument(
        "--setting",
        type=_setting,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help=f"same as {PREFIX}<KEY>=<VALUE>",
    )


def deployment_of(
    arguments: argparse.Namespace, forced: Mapping[str, str] | None = None
) -> tuple[Path, tuple[str, ...], dict[str, str]]:
    """Repository, models and variables for an EmbeddedServer; `forced` settings win. Raises DeepstackError."""
    repository = _repository(arguments.model_repository)
    models = pipelines_of(repository).models
    return repository, models, _environment(arguments, models, forced or {})


def wait_until_ready(server: EmbeddedServer, timeout_s: float, listener: ProgressListener) -> None:
    """Load the models, and ask until an answer comes. Raises UnavailableError that names the server's log."""
    try:
        server.wait_until_ready(timeout_s, lambda: server.ask(_PROBE_TEXT), listener)
    except UnavailableError as error:
        if not server.is_running():  # the error of a server that has ended names the log itself
            raise
        raise EmbeddedServerError(f"{error}; the server's log is {server.log_path}") from error


def _environment(arguments: argparse.Namespace, models: Sequence[str], forced: Mapping[str, str]) -> dict[str, str]:
    """The variables that the models read. They are checked here first, where a refusal is seen at once."""
    chosen = {f"{PREFIX}{key.upper()}": value for key, value in (*arguments.setting, *forced.items())}
    if arguments.checkpoint is not None:
        chosen[f"{PREFIX}CHECKPOINT"] = str(arguments.checkpoint)
    complete = {**os.environ, **chosen}
    settings = load_settings(complete)
    settings.check_devices(models)
    # The server's working folder is not the user's: relative paths are resolved while they mean something.
    chosen[f"{PREFIX}CHECKPOINT"] = str(settings.checkpoint.absolute())
    if FILE_VARIABLE in complete:
        chosen[FILE_VARIABLE] = str(Path(complete[FILE_VARIABLE]).absolute())
    return chosen


def _repository(wanted: Path | None) -> Path:
    candidates = [wanted] if wanted else [Path(_FOLDER_NAME), Path(__file__).parents[2] / _FOLDER_NAME]
    found = next((folder for folder in candidates if folder.is_dir()), None)
    if found is None:
        tried = ", ".join(str(folder) for folder in candidates)
        raise EmbeddedServerError(f"no model repository at {tried}; name one with --model-repository")
    return found


def _setting(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return key, value
