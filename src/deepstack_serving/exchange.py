"""What the language stages hand each other within one call of several decode steps: a region of shared memory.

It has a link per border: stage i to stage i + 1 for hidden states, and the last stage to the first for tokens. A link
holds one message; the ring of stages never has a second one on its way. The orchestrator makes the region, numbers the
bursts, and sets the abort mark when a call of a burst fails, so that no stage waits for one that will never send.

Numbers are single aligned words that one side writes and the others read; a message is there before its number is
(x86-64 keeps the order of stores).
"""

from __future__ import annotations

import mmap
import os
import re
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deepstack_serving.errors import StageError, WireError, shown
from deepstack_serving.regions import REGION_DIRECTORY, is_orphaned, region_prefix, sweep_orphaned_regions

WAIT_TIMEOUT_S = 60.0
_SPINS = 200
_YIELDING_S = 0.02
_PAUSE_S = 0.0002
_CHECK_INTERVAL_S = 0.5
_TICKET = re.compile(r"(deepstack_[0-9]+_[0-9]+_exchange_[0-9a-f]+):([0-9]{1,15})")

_TOKEN_BYTES = 8
_MAGIC = 0x5EED_DEE9_57AC_0001
_LINE = 8  # words of a cache line
_PAGE_BYTES = 4096
_BURST, _ABORTED, _LINKS = 1, 2, 3  # words of the region, behind the magic number
_MESSAGE, _BYTES, _CAPACITY, _OFFSET = range(4)  # words of each link's line
_MESSAGES = 1 << 20  # more than the messages of one burst


class Exchange:
    """A region, mapped into this process. Its owner calls `create`, `begin`, `abort` and `close`, the stages `open`."""

    def __init__(self, path: Path, memory: mmap.mmap) -> None:
        self.path = path
        self.words = memoryview(memory).cast("q")
        self.bytes = torch.from_numpy(np.frombuffer(memory, dtype=np.uint8))

    def pin(self) -> None:
        """Let a GPU copy from and to the region directly; where that is refused, copies are slower but as right."""
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        with suppress(RuntimeError):
            torch.cuda.check_error(runtime.cudaHostRegister(self.bytes.data_ptr(), self.bytes.nbytes, 0))

    @classmethod
    def create(cls, link_bytes: Sequence[int], folder: Path = REGION_DIRECTORY) -> Exchange:
        """A new region with links of these sizes; those of dead owners go. Raises OSError when there is no room."""
        sweep_orphaned_regions(folder)
        path = folder / f"{region_prefix(os.getpid())}exchange_{secrets.token_hex(8)}"
        offsets = [_PAGE_BYTES]
        for size in link_bytes:
            offsets.append(offsets[-1] + -(-size // _PAGE_BYTES) * _PAGE_BYTES)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(file, 0, offsets[-1])  # a page that cannot be had later would end the process
            made = cls(path, mmap.mmap(file, offsets[-1]))
        except OSError:
            path.unlink()
            raise
        finally:
            os.close(file)
        for index, (size, offset) in enumerate(zip(link_bytes, offsets, strict=False)):
            line = (1 + index) * _LINE
            made.words[line + _CAPACITY], made.words[line + _OFFSET] = size, offset
        made.words[_LINKS], made.words[0] = len(link_bytes), _MAGIC
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

    def begin(self) -> str:
        """Start the next burst. The ticket goes to every stage; what belongs to an earlier one is refused from now."""
        self.words[_BURST] += 1
        return f"{self.path.name}:{self.words[_BURST]}"

    def abort(self) -> None:
        """Let every stage that waits in the burst of now give up."""
        self.words[_ABORTED] = self.words[_BURST]

    def close(self) -> None:
        """Remove the name; the memory goes when the last stage lets go of it."""
        self.path.unlink(missing_ok=True)


class Link:
    """One end of a link, for one burst."""

    def __init__(self, exchange: Exchange, index: int, burst: int, *, spins: bool = True) -> None:
        self._exchange, self._words, self._index, self._burst = exchange, exchange.words, index, burst
        self._yielding_s = _YIELDING_S if spins else 0.0
        self._line = (1 + index) * _LINE
        self.capacity = self._words[self._line + _CAPACITY]
        offset = self._words[self._line + _OFFSET]
        self._content = exchange.bytes[offset : offset + self.capacity]
        self._message = burst * _MESSAGES

    def send(self, tensor: torch.Tensor) -> None:
        """Copy a tensor of any device into the link. Raises StageError when the burst is over or it does not fit."""
        self._check_burst()
        if tensor.nbytes > self.capacity:
            raise StageError(f"{tensor.nbytes} bytes do not fit link {self._index} of {self.capacity}")
        self._view(tensor).copy_(tensor)  # comes back when the bytes are there, from a GPU too
        self._message += 1
        self._words[self._line + _BYTES] = tensor.nbytes
        self._words[self._line + _MESSAGE] = self._message

    def receive(self, target: torch.Tensor, timeout_s: float = WAIT_TIMEOUT_S) -> torch.Tensor:
        """Fill a tensor of any device with the next message. Raises StageError when none comes or its size differs."""
        self._message += 1
        self._wait(timeout_s)
        size = self._words[self._line + _BYTES]
        if size != target.nbytes:
            raise StageError(f"link {self._index} holds {size} bytes, {target.nbytes} were expected")
        # Without waiting for a GPU: the link is written again only after this stage has sent or answered, which waits.
        return target.copy_(self._view(target), non_blocking=True)

    def _view(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._content[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    def _wait(self, timeout_s: float) -> None:
        """Spin, then let others run, then sleep: a message is mostly there within a step's few milliseconds.

        Where the stages share a CPU a stage that spins would take what the other one computes with.
        """
        place, words, wanted = self._line + _MESSAGE, self._words, self._message
        for _ in range(_SPINS):
            if words[place] == wanted:
                return
        started_s = checked_s = time.monotonic()
        while words[place] != wanted:
            self._check_burst()
            now_s = time.monotonic()
            if now_s - checked_s > _CHECK_INTERVAL_S:
                checked_s = now_s
                if is_orphaned(self._exchange.path.name):
                    raise StageError("the orchestrator that began this burst is gone")
            if now_s - started_s > timeout_s:
                raise StageError(f"nothing came over link {self._index} within {timeout_s:g} s")
            time.sleep(_PAUSE_S if now_s - started_s >= self._yielding_s else 0)

    def _check_burst(self) -> None:
        if self._words[_BURST] != self._burst:
            raise StageError(f"burst {self._burst} is over, {self._words[_BURST]} has begun")
        if self._words[_ABORTED] == self._burst:
            raise StageError(f"burst {self._burst} was given up: another stage failed")
        if self._words[self._line + _MESSAGE] > self._message:
            raise StageError(f"link {self._index} has messages that burst {self._burst} does not expect")


class ExchangeDoor:
    """A stage's way to exchanges. Keeps the last one open: calls of one orchestrator all name the same."""

    def __init__(
        self, index: int, stages: int, row_bytes: int, folder: Path = REGION_DIRECTORY, *, on_gpu: bool = False
    ) -> None:
        self._index, self._stages, self._folder = index, stages, folder
        self._row_bytes = _TOKEN_BYTES if index == stages - 1 else row_bytes
        self._exchange: Exchange | None = None
        self._on_gpu = on_gpu

    def join(self, ticket: str, rows: int) -> tuple[Link, Link]:
        """The links that this stage receives over and sends over, in the burst of a ticket.

        Raises WireError for a ticket that no orchestrator of this split made, or when so many rows do not fit.
        """
        match = _TICKET.fullmatch(ticket)
        if match is None:
            raise WireError(f"tensor 'exchange' is {shown(ticket)}; allowed: <name of an exchange>:<number of a burst>")
        if self._exchange is None or self._exchange.path.name != match[1]:
            self._exchange = Exchange.open(match[1], self._folder)
            if self._on_gpu:
                self._exchange.pin()
        if self._exchange.links != self._stages:
            raise WireError(f"tensor 'exchange' names one of {self._exchange.links} links for {self._stages} stages")
        before = (self._index - 1) % self._stages
        incoming, outgoing = (
            Link(self._exchange, index, int(match[2]), spins=self._on_gpu) for index in (before, self._index)
        )
        if rows * self._row_bytes > outgoing.capacity:
            raise WireError(f"tensor 'exchange' names one whose links are too small for {rows} sequences")
        return incoming, outgoing


def link_sizes(stages: int, rows: int, row_bytes: int) -> list[int]:
    """Bytes of each link for this many sequences: hidden states between the stages, tokens from the last."""
    return [rows * row_bytes] * (stages - 1) + [rows * _TOKEN_BYTES]
