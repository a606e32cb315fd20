"""What the machine itself can do: `python -m bench.gpu.limits DEVICE`. Copies and matrix products of random numbers."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from bench.figures import median
from bench.gpu.arms import Phases

_PHASE_LIMIT_S = 60.0
_COPY_BYTES = {"cuda": 4 << 30, "cpu": 64 << 20}
_SIDES = {"cuda": 8192, "cpu": 512}
_REPEATS = 7
_WARM_UP = 3


def copy_bandwidth(device: str) -> dict[str, Any]:
    """Bytes read and written per second by a copy within the device's memory."""
    count = _COPY_BYTES[kind_of(device)]
    source = torch.randint(0, 256, (count,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = _median_s(lambda: target.copy_(source), device)
    return {"bytes": count, "bytes_per_s": 2 * count / seconds}


def matrix_rate(device: str) -> dict[str, Any]:
    """Operations per second of a square bfloat16 matrix product."""
    side = _SIDES[kind_of(device)]
    left, right = (torch.randn(side, side, dtype=torch.bfloat16, device=device) for _ in range(2))
    seconds = _median_s(lambda: left @ right, device)
    return {"side": side, "flop_per_s": 2 * side**3 / seconds}


def host_copy(device: str) -> dict[str, Any]:
    """Bytes per second from pinned host memory to the device: what tensors through host memory cost at best."""
    count = _COPY_BYTES[kind_of(device)] // 16
    source = torch.empty(count, dtype=torch.uint8, pin_memory=device != "cpu")
    target = torch.empty(count, dtype=torch.uint8, device=device)
    return {"bytes": count, "bytes_per_s": count / _median_s(lambda: target.copy_(source), device)}


def kind_of(device: str) -> str:
    return device.partition(":")[0]


def _median_s(call: Callable[[], object], device: str) -> float:
    times = []
    for _ in range(_WARM_UP + _REPEATS):
        started_s = time.perf_counter()
        call()
        if device != "cpu":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started_s)
    return median(times[_WARM_UP:])


def main() -> None:
    device = sys.argv[1]
    phases = Phases(_PHASE_LIMIT_S)
    for name, measure in (("copy", copy_bandwidth), ("matrix product", matrix_rate), ("host to device", host_copy)):
        phases.run(name, partial(measure, device))


if __name__ == "__main__":
    main()
