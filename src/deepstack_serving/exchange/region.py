"""What the language stages hand each other within a call of all of them at once: a region of shared memory.

It has a link per border for hidden states (stage i to stage i + 1), one for the tokens, which go from the last stage to
the first, and one for their log-probabilities. The orchestrator makes the region, numbers the bursts and reads tokens
as they come; it sets the mark that ends a burst early, and the abort mark when a call of a burst fails, so that no
stage waits for one that will never send.

Numbers are single aligned words that one side writes and the others read; a message is there before its number is
(x86-64 keeps the order of stores).
"""

from __future__ import annotations

import logging
import mmap
import os
import re
import secrets
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deepstack_serving.errors import WireError, shown
from deepstack_serving.regions import REGION_DIRECTORY, region_prefix, sweep_orphaned_regions

MAX_DECODE_STEPS = 64
TOKEN_BYTES, LOGPROB_BYTES = 8, 4
MESSAGES = 1 << 20  # more than the messages of one burst
_TICKET = re.compile(r"(deepstack_[0-9]+_[0-9]+_exchange_[0-9a-f]+):([0-9]{1,15})")
_MAGIC = 0x5EED_DEE9_57AC_0002
_LINE = 8  # words of a cache line
_PAGE_BYTES = 4096
_BURST, _ABORTED, _ENDING, _LINKS = 1, 2, 3, 4  # words of the region, behind the magic number
_MESSAGE, _BYTES, _CAPACITY, _PLACES, _OFFSET = range(5)  # words of each link's line


@dataclass(frozen=True)
class LinkSize:
    """`capacity` bytes of a message, and how many messages are kept: the link's places, taken in turn."""

    capacity: int
    places: int = 1


class LinkMemory:
    """A link's words and places."""

    def __init__(self, exchange: Exchange, index: int) -> None:
        self._words, self._line = exchange.words, (1 + index) * _LINE
        self.capacity, self._places, offset = (self._words[self._line + word] for word in (_CAPACITY, _PLACES, _OFFSET))
        self._content = exchange.bytes[offset : offset + self.capacity * self._places]

    @property
    def message(self) -> int:
        """The number of the latest message."""
        return self._words[self._line + _MESSAGE]

    @property
    def message_bytes(self) -> int:
        """The size of the latest message."""
        return self._words[self._line + _BYTES]

    def publish(self, message: int, size: int) -> None:
        """The message is in its place."""
        self._words[self._line + _BYTES] = size
        self._words[self._line + _MESSAGE] = message

    def place(self, message: int, like: torch.Tensor) -> torch.Tensor:
        """Where this message lies, as a tensor of the same type and shape as `like`."""
        start = (message - 1) % self._places * self.capacity
        return self._content[start : start + like.nbytes].view(like.dtype).view(like.shape)


class Exchange:
    """A region, mapped into this process. Its owner calls `create`, `begin`, `abort` and `close`, the stages `open`."""

    def __init__(self, path: Path, memory: mmap.mmap) -> None:
        self.path = path
        self.words = memoryview(memory).cast("q")
        self.bytes = torch.from_numpy(np.frombuffer(memory, dtype=np.uint8))
        self._registration: weakref.finalize[..., Any] | None = None

    @property
    def is_pinned(self) -> bool:
        return self._registration is not None and self._registration.alive

    def pin(self) -> None:
        """Let a GPU copy from and to the region directly; where that is refused, copies are slower but as right.

        That ends with `unpin` or with this object, before the memory goes: another mapping may get its addresses,
        which a GPU would take for this one's.
        """
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        address = self.bytes.data_ptr()
        try:
            torch.cuda.check_error(runtime.cudaHostRegister(address, self.bytes.nbytes, 0))
        except RuntimeError as error:
            logging.getLogger(__name__).warning("shared memory cannot be pinned, copies are slower: %s", error)
            with suppress(RuntimeError):  # the driver keeps the refusal for the next launch
                torch.zeros(1, device="cuda")
            return
        self._registration = weakref.finalize(self, runtime.cudaHostUnregister, address)
        self._registration.atexit = False  # the process's end does it

    def unpin(self) -> None:
        """Nothing of the region is pinned any more."""
        if self._registration is not None:
            self._registration()

    @classmethod
    def create(cls, sizes: Sequence[LinkSize], folder: Path = REGION_DIRECTORY) -> Exchange:
        """A new region with these links; those of dead owners go. Raises OSError when there is no room."""
        sweep_orphaned_regions(folder)
        path = folder / f"{region_prefix(os.getpid())}exchange_{secrets.token_hex(8)}"
        offsets = [_PAGE_BYTES]
        for size in sizes:
            offsets.append(offsets[-1] + -(-size.capacity * size.places // _PAGE_BYTES) * _PAGE_BYTES)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(file, 0, offsets[-1])  # a page that cannot be had later would end the process
            made = cls(path, mmap.mmap(file, offsets[-1]))
        except OSError:
            path.unlink()
            raise
        finally:
            os.close(file)
        for index, (size, offset) in enumerate(zip(sizes, offsets, strict=False)):
            line = (1 + index) * _LINE
            for word, value in ((_CAPACITY, size.capacity), (_PLACES, size.places), (_OFFSET, offset)):
                made.words[line + word] = value
        made.words[_LINKS], made.words[0] = len(sizes), _MAGIC
        return made

    @classmethod
    def open(cls, name: str, folder: Path = REGION_DIRECTORY) -> Exchange:
        """The region of this name. Raises WireError when it is not there or is none."""
        path = folder / name
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                memory = mmap.mmap(file, 0)
            finally:
                os.close(file)
        except (OSError, ValueError) as error:
            raise WireError(f"tensor 'exchange' names {name}, which cannot be opened: {error}") from error
        made = cls(path, memory) if len(memory) and len(memory) % _PAGE_BYTES == 0 else None
        if made is None or made.words[0] != _MAGIC:
            raise WireError(f"tensor 'exchange' names {name}, which is no exchange of this version")
        return made

    @property
    def links(self) -> int:
        return self.words[_LINKS]

    @property
    def burst(self) -> int:
        """The number of the burst that was begun last."""
        return self.words[_BURST]

    def begin(self) -> str:
        """Start the next burst. The ticket goes to every stage; what belongs to an earlier one is refused from now."""
        self.words[_BURST] += 1
        return f"{self.path.name}:{self.burst}"

    def abort(self) -> None:
        """Let every stage that waits in the burst of now give up."""
        self.words[_ABORTED] = self.burst

    def is_aborted(self, burst: int) -> bool:
        return self.words[_ABORTED] == burst

    def end_early(self) -> None:
        """Let the burst of now end with the step that its first stage runs."""
        self.words[_ENDING] = self.burst

    def is_ending(self, burst: int) -> bool:
        return self.words[_ENDING] == burst

    def close(self) -> None:
        """Remove the name; the memory goes when the last stage lets go of it."""
        self.path.unlink(missing_ok=True)


def parse_ticket(ticket: str) -> tuple[str, int]:
    """Name of an exchange and number of a burst. Raises WireError for what `begin` never made."""
    match = _TICKET.fullmatch(ticket)
    if match is None:
        raise WireError(f"tensor 'exchange' is {shown(ticket)}; allowed: <name of an exchange>:<number of a burst>")
    return match[1], int(match[2])


def link_sizes(stages: int, rows: int, sequences: int, row_bytes: int) -> list[LinkSize]:
    """The links between so many stages, for steps of so many rows and sequences."""
    kept = (LinkSize(sequences * size, MAX_DECODE_STEPS) for size in (TOKEN_BYTES, LOGPROB_BYTES))
    return [LinkSize(rows * row_bytes)] * (stages - 1) + list(kept)
