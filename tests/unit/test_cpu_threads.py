"""Compute threads get CPUs of their own only where a stage takes all CPUs; each case is a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest

CPUS = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
pytestmark = pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs and their affinity")


def threads(cpu_threads: int, device: str) -> int:
    """What torch computes with, in a stage on this device."""
    program = f"""
        import torch
        from deepstack_serving.settings import Settings
        from deepstack_serving.stages.cpu_threads import limit_cpu_threads

        limit_cpu_threads(Settings(checkpoint=None, cpu_threads={cpu_threads}), "{device}")
        print(torch.get_num_threads())
    """
    return int(run(program))


def masks(cpu_threads: int) -> dict[str, list[list[int]]]:
    """The CPUs of the compute threads, and of a thread that was there before."""
    program = f"""
        import json, os, threading
        import torch
        from deepstack_serving.settings import Settings
        from deepstack_serving.stages.cpu_threads import _threads, bind_cpu_threads, limit_cpu_threads

        stop = threading.Event()
        other = threading.Thread(target=stop.wait)
        other.start()
        before = _threads()
        settings = Settings(checkpoint=None, cpu_threads={cpu_threads})
        limit_cpu_threads(settings, "cpu")
        bind_cpu_threads(settings)
        torch.zeros(1 << 22).add_(1)
        compute = [os.getpid(), *sorted(_threads() - before)]
        cpus = {{"compute": compute, "other": [other.native_id]}}
        print(json.dumps({{name: [sorted(os.sched_getaffinity(i)) for i in ids] for name, ids in cpus.items()}}))
        stop.set()
    """
    result: dict[str, list[list[int]]] = json.loads(run(program))
    return result


def run(program: str) -> str:
    command = [sys.executable, "-c", textwrap.dedent(program)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.mark.parametrize(("cpu_threads", "device", "expected"), [(0, "cuda:0", 1), (2, "cuda:0", 2), (1, "cpu", 1)])
def test_a_stage_computes_with_the_threads_that_are_set(cpu_threads: int, device: str, expected: int) -> None:
    assert threads(cpu_threads, device) == expected


def test_a_stage_on_a_gpu_takes_one_thread_where_torch_would_take_more() -> None:
    assert threads(0, "cpu") > threads(0, "cuda:0")


def test_each_compute_thread_has_a_cpu_and_others_stay_free() -> None:
    found = masks(0)
    assert found["compute"] == [[cpu] for cpu in CPUS]
    assert found["other"] == [CPUS]


def test_a_stage_with_fewer_threads_is_left_alone() -> None:
    found = masks(1)
    assert {tuple(cpus) for cpus in found["compute"]} == {tuple(CPUS)}
