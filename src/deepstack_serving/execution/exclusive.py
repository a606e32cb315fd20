"""One process at a time compiles on a GPU: kernels are tuned by timing them, which another process there would disturb.

The others then find the compiled code on disk, as the stages of a model share most of it. A process that has compiled
leaves a mark, and where one like it finds that, nothing is left to be tuned and nobody has to wait.
"""

from __future__ import annotations

import fcntl
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deepstack_serving.errors import SettingsError


@contextmanager
def exclusive(folder: Path, device: str, code: str) -> Iterator[None]:
    """Wait for the device's turn, unless this `code` (a name of all that it depends on) was compiled before.

    The turn ends with the block, or with the process. Raises SettingsError when the folder cannot be made or written.
    """
    path, mark = folder / f"{device.replace(':', '-')}.lock", folder / f"{code}.compiled"
    if mark.exists():
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as error:
        raise SettingsError(
            f"setting 'compile_cache_folder' is {str(folder)!r}, which cannot be used: {error}; name another folder, "
            "or set 'compile' to 'off'"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logging.getLogger(__name__).info("another stage compiles on %s: waiting for it", device)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
        mark.touch()
