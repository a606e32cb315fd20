"""A stage's ends of the links of an exchange, for one burst."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from deepstack_serving.errors import StageError, WireError
from deepstack_serving.exchange.region import MESSAGES, TOKEN_BYTES, Exchange, LinkMemory, parse_ticket
from deepstack_serving.regions import REGION_DIRECTORY, is_orphaned

WAIT_TIMEOUT_S = 60.0  # for a decode step
STEP_TIMEOUT_S = 600.0  # for a step of any kind: a long prompt on a CPU, or one that is compiled for
_SPINS = 200
_YIELDING_S = 0.02
_PAUSE_S = 0.0002
_CHECK_INTERVAL_S = 0.5
MOST_OPEN = 16  # exchanges of a stage: as many as there may be groups
_END = -1  # the size of the message behind the last one


class Link:
    """One end of a link, for one burst."""

    def __init__(self, exchange: Exchange, index: int, burst: int, *, spins: bool = True) -> None:
        self._exchange, self._index, self._burst = exchange, index, burst
        self._memory = LinkMemory(exchange, index)
        self._yielding_s = _YIELDING_S if spins else 0.0
        self.capacity = self._memory.capacity
        self._message = burst * MESSAGES

    def send(self, tensor: torch.Tensor) -> None:
        """Copy a tensor of any device into the link. Raises StageError when the burst is over or it does not fit."""
        self._next_place(tensor).copy_(tensor)  # comes back when the bytes are there, from a GPU too
        self._memory.publish(self._message, tensor.nbytes)

    def post(self, tensor: torch.Tensor) -> None:
        """Begin to `send`: the caller waits for the device and calls `publish` before it posts again."""
        self._next_place(tensor).copy_(tensor, non_blocking=True)

    def publish(self, tensor: torch.Tensor) -> None:
        """What was posted has arrived."""
        self._memory.publish(self._message, tensor.nbytes)

    def send_end(self) -> None:
        """Tell the receiver that no message follows in this burst."""
        self._check_burst()
        self._message += 1
        self._memory.publish(self._message, _END)

    def receive(self, target: torch.Tensor, timeout_s: float = WAIT_TIMEOUT_S) -> bool:
        """Fill a tensor of any device with the next message; False when there is none because the burst ends.

        Raises StageError when nothing comes or its size differs.
        """
        self._message += 1
        self._wait(timeout_s)
        size = self._memory.message_bytes
        if size == _END:
            return False
        if size != target.nbytes:
            raise StageError(f"link {self._index} holds {size} bytes, {target.nbytes} were expected")
        # Without waiting for a GPU: the place is written again only after this stage has sent or answered, which waits.
        target.copy_(self._memory.place(self._message, target), non_blocking=True)
        return True

    def sent(self, like: torch.Tensor) -> list[torch.Tensor]:
        """All messages that were sent over this end, which must still be in their places, as copies like `like`."""
        first = self._burst * MESSAGES + 1
        return [self._memory.place(message, like).clone() for message in range(first, self._message + 1)]

    def _next_place(self, tensor: torch.Tensor) -> torch.Tensor:
        self._check_burst()
        if tensor.nbytes > self.capacity:
            raise StageError(f"{tensor.nbytes} bytes do not fit link {self._index} of {self.capacity}")
        self._message += 1
        return self._memory.place(self._message, tensor)

    def _wait(self, timeout_s: float) -> None:
        """Spin, then let others run, then sleep: a message is mostly there within a step's few milliseconds.

        Where the stages share a CPU a stage that spins would take what the other one computes with.
        """
        memory, wanted = self._memory, self._message
        for _ in range(_SPINS):
            if memory.message == wanted:
                return
        started_s = checked_s = time.monotonic()
        while memory.message != wanted:
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
        if self._exchange.burst != self._burst:
            raise StageError(f"burst {self._burst} is over, {self._exchange.burst} has begun")
        if self._exchange.is_aborted(self._burst):
            raise StageError(f"burst {self._burst} was given up: another stage failed")
        if self._memory.message > self._message:
            raise StageError(f"link {self._index} has messages that burst {self._burst} does not expect")


@dataclass(frozen=True)
class BurstLinks:
    """What one stage receives and sends over in one burst: hidden states between stages, tokens from the last one.

    `logprobs` is the last stage's: the orchestrator takes a step's tokens from the region once these are there.
    """

    exchange: Exchange
    burst: int
    incoming: Link
    outgoing: Link
    logprobs: Link

    @property
    def is_ending(self) -> bool:
        """Whether the orchestrator wants no further step. For the first stage alone to ask: the others hear from it."""
        return self.exchange.is_ending(self.burst)


class ExchangeDoor:
    """A stage's way to exchanges. Keeps those open that calls name again: one for each group of sequences."""

    def __init__(
        self, index: int, stages: int, row_bytes: int, folder: Path = REGION_DIRECTORY, *, on_gpu: bool = False
    ) -> None:
        self._index, self._stages, self._folder = index, stages, folder
        self._row_bytes = TOKEN_BYTES if index == stages - 1 else row_bytes
        self._exchanges: dict[str, Exchange] = {}
        self._on_gpu = on_gpu

    def join(self, ticket: str, rows: int) -> BurstLinks:
        """The links of this stage in the burst of a ticket, over which it sends so many rows a step.

        Raises WireError for a ticket that no orchestrator of this split made, or when the rows do not fit.
        """
        name, burst = parse_ticket(ticket)
        exchange = self._open(name)
        if exchange.links != self._stages + 1:
            raise WireError(
                f"tensor 'exchange' names one of {exchange.links} links; {self._stages} stages have {self._stages + 1}"
            )
        before = (self._index - 1) % self._stages
        links = BurstLinks(
            exchange,
            burst,
            *(Link(exchange, index, burst, spins=self._on_gpu) for index in (before, self._index, self._stages)),
        )
        if rows * self._row_bytes > links.outgoing.capacity:
            raise WireError(f"tensor 'exchange' names one whose links are too small for {rows} rows")
        return links

    def _open(self, name: str) -> Exchange:
        if name not in self._exchanges:
            opened = Exchange.open(name, self._folder)
            self._let_go()
            if self._on_gpu:
                opened.pin()
            self._exchanges[name] = opened
        return self._exchanges[name]

    def _let_go(self) -> None:
        """Of exchanges that are closed or whose orchestrator is gone; of the oldest, should there be too many."""
        for name, exchange in list(self._exchanges.items()):
            is_over = not exchange.path.exists() or is_orphaned(name)
            if is_over or len(self._exchanges) >= MOST_OPEN:
                del self._exchanges[name]
                exchange.unpin()
