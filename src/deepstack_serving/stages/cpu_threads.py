"""The compute threads of a process: how many, and where they run."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

from deepstack_serving.settings import Settings

_TASKS = Path("/proc/self/task")
_PARALLEL_ELEMENTS = 1 << 22  # torch shares such an operation out among all its threads


def limit_cpu_threads(settings: Settings, device: str) -> None:
    """Apply 'cpu_threads' to the process of a stage; 0 leaves torch's own choice on a CPU."""
    if settings.cpu_threads:
        torch.set_num_threads(settings.cpu_threads)
    elif device != "cpu":
        use_one_cpu_thread()


def use_one_cpu_thread() -> None:
    """For a process whose host tensors are small.

    Some operations on these wake all of OpenMP's threads nevertheless (repeat_interleave does), which then spin for
    milliseconds: with a process for each stage there are more of them than CPUs.
    """
    torch.set_num_threads(1)


def bind_cpu_threads(settings: Settings) -> None:
    """Give each compute thread a CPU of its own, where a stage takes all CPUs; other threads stay free.

    The stages compute in turn, each with threads of its own: when they wake up, the system may put two of them on one
    CPU, where one waits for the other at every barrier. To be called on the thread that will compute, before it has
    computed anything in parallel.
    """
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if settings.cpu_threads or torch.get_num_threads() != len(cpus):
        return
    workers = _new_threads(lambda: torch.zeros(_PARALLEL_ELEMENTS).add_(1))
    if len(workers) != len(cpus) - 1:  # not the threads of OpenMP, or not only those
        return
    for thread, cpu in zip((0, *workers), cpus, strict=True):
        os.sched_setaffinity(thread, {cpu})


def _new_threads(function: Callable[[], object]) -> list[int]:
    """The ids of the threads that a call leaves behind, in the order of their making."""
    before = _threads()
    function()
    return sorted(_threads() - before)


def _threads() -> set[int]:
    return {int(path.name) for path in _TASKS.iterdir()} if _TASKS.is_dir() else set()
