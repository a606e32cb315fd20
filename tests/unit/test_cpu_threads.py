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
        limit_cpu_threads(settings)
        bind_cpu_threads(settings)
        torch.zeros(1 << 22).add_(1)
        compute = [os.getpid(), *sorted(_threads() - before)]
        cpus = {{"compute": compute, "other": [other.native_id]}}
        print(json.dumps({{name: [sorted(os.sched_getaffinity(i)) for i in ids] for name, ids in cpus.items()}}))
        stop.set()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=120, check=True
    )
    result: dict[str, list[list[int]]] = json.loads(done.stdout)
    return result


def test_each_compute_thread_has_a_cpu_and_others_stay_free() -> None:
    found = masks(0)
    assert found["compute"] == [[cpu] for cpu in CPUS]
    assert found["other"] == [CPUS]


def test_a_stage_with_fewer_threads_is_left_alone() -> None:
    found = masks(1)
    assert {tuple(cpus) for cpus in found["compute"]} == {tuple(CPUS)}
