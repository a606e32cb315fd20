"""What a GPU has left for this process, in figures that errors can show, and what this process can do without."""

from __future__ import annotations

import ctypes
from contextlib import suppress

import torch

STACK_BYTES = 128
_STACK_SIZE = 0  # the driver's number for this limit


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


def trim_stacks() -> None:
    """Lower what this process's CUDA contexts keep for stacks: by default 1 KiB for each thread that a GPU can run.

    That is 240 MB a process on an H200. A kernel that is known to need more still gets it; this is for those of which
    it is not known. Where the driver refuses, all stays as it was.
    """
    with suppress(OSError, AttributeError):
        driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
        if driver.cuDeviceGetCount(ctypes.byref(count)) == 0:
            for device in range(count.value):
                _trim(driver, device)


def _trim(driver: ctypes.CDLL, device: int) -> None:
    """Of one device, if there is a context on it."""
    flags, is_active, context = ctypes.c_uint(), ctypes.c_int(), ctypes.c_void_p()
    driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(is_active))
    if is_active.value and driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0:
        driver.cuCtxPushCurrent_v2(context)
        driver.cuCtxSetLimit(_STACK_SIZE, ctypes.c_size_t(STACK_BYTES))
        driver.cuCtxPopCurrent_v2(ctypes.byref(context))
        driver.cuDevicePrimaryCtxRelease_v2(device)
