"""Owner of the KV blocks' numbers. A request gets all that it can ever need at admission and returns them at its end.

Reserving in full means that an admitted request always finishes: nothing is preempted or computed twice.
"""

from __future__ import annotations

import heapq


class BlockAllocator:
    """Hands out the lowest free numbers, so that a request's blocks mostly follow each other in the pool."""

    def __init__(self, total: int, block_size: int) -> None:
        self.total = total
        self.block_size = block_size
        self._free = list(range(total))
        self._used: set[int] = set()

    def resize(self, total: int) -> None:
        """Set the number of blocks. Raises RuntimeError when it changes while some are in use."""
        if total == self.total:
            return
        if self._used:
            raise RuntimeError(
                f"the KV pool changed from {self.total} to {total} blocks while {len(self._used)} are in use"
            )
        self.total, self._free = total, list(range(total))

    @property
    def free(self) -> int:
        return len(self._free)

    def needed(self, tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks. Raises RuntimeError when fewer are free: look at `free` first."""
        if count > len(self._free):
            raise RuntimeError(f"{count} blocks were asked for, {len(self._free)} are free")
        blocks = [heapq.heappop(self._free) for _ in range(count)]
        self._used.update(blocks)
        return blocks

    def release(self, blocks: list[int]) -> None:
        """Give blocks back. Raises RuntimeError for one that is not in use: its bookkeeping would be lost."""
        for block in blocks:
            if block not in self._used:
                raise RuntimeError(f"block {block} was released but is not in use")
            self._used.remove(block)
            heapq.heappush(self._free, block)

    def check(self, idle: bool) -> None:
        """Conservation: free + used = total, and nothing is used when idle. Raises RuntimeError."""
        if len(self._free) + len(self._used) != self.total or (idle and self._used):
            raise RuntimeError(
                f"blocks leak: {len(self._free)} free, {len(self._used)} used of {self.total}, idle {idle}"
            )
