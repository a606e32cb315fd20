"""What a GPU has left for this process, in figures that errors can show."""

from __future__ import annotations

import torch


def free_bytes(device: str) -> int | None:
    """What this process can still allocate on a GPU: the driver's free memory and what torch holds unused.

    None on a CPU, whose memory is not counted.
    """
    if not device.startswith("cuda"):
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def in_gibibytes(count: float) -> str:
    """A number of bytes as errors show it."""
    return f"{count / 2**30:.2f} GiB"
