"""What a real GPU does when a call needs too much of it, or breaks it. Each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROJECT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
START = """
import torch
from deepstack_serving.errors import SettingsError, StageError, UnavailableError
from deepstack_serving.stages.device import DeviceGuard, use_device

def refused(kind, run):
    try:
        with guard.watch():
            run()
    except kind as error:
        return str(error)
    raise SystemExit("nothing was refused")

guard = DeviceGuard("language_early", "cuda:0")
use_device("cuda:0")
"""


def run(program: str, *arguments: str) -> str:
    """What the program printed."""
    command = [sys.executable, "-c", START + program, *arguments]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_call_that_needs_too_much_leaves_the_device_to_the_next() -> None:
    printed = run("""
print(refused(UnavailableError, lambda: torch.empty(2**50, device="cuda:0")))
with guard.watch():
    print(int(torch.ones(8, device="cuda:0").sum()))
""")
    assert "language_early ran out of memory on cuda:0, which has" in printed
    assert printed.splitlines()[-1] == "8"


def test_call_that_breaks_the_device_is_the_last() -> None:
    printed = run("""
def out_of_range():
    torch.zeros(4, device="cuda:0")[torch.tensor([9], device="cuda:0")].sum().item()

print(refused(StageError, out_of_range))
print(refused(StageError, lambda: print("computed")))
""")
    first, second = [line for line in printed.splitlines() if "language_early lost cuda:0" in line]
    assert second == first
    assert "computed" not in printed


def test_kv_pool_beyond_the_gpu_is_refused_with_both_sizes() -> None:
    printed = run("""
from deepstack_serving.kv_pool import KVPool, KVShape

shape = KVShape(8, 128, torch.bfloat16)
print(refused(SettingsError, lambda: KVPool(0, 36, 2**24, 16, shape, "cuda:0")))
""")
    assert "KV pool of 16777216 blocks (36864.00 GiB) does not fit on cuda:0, which has" in printed


def test_weights_beyond_the_gpu_are_refused_with_both_sizes(checkpoint: Path) -> None:
    program = """
import sys
from pathlib import Path
from deepstack_serving.checkpoint import open_checkpoint
from deepstack_serving.stages.loading import load_vision_stage

opened = open_checkpoint(Path(sys.argv[1]), "auto")
torch.cuda.set_per_process_memory_fraction(1e-7)
print(refused(SettingsError, lambda: load_vision_stage(opened, "cuda:0")))
"""
    printed = run(program, str(checkpoint))
    assert "of weights do not fit on cuda:0, which had" in printed
    assert "'device' or 'devices'" in printed


def test_contexts_keep_little_for_stacks() -> None:
    program = """
import ctypes
from deepstack_serving.gpu_memory import STACK_BYTES, trim_stacks
size = ctypes.c_size_t()
torch.zeros(8, device="cuda").sort()
ctypes.CDLL("libcuda.so.1").cuCtxGetLimit(ctypes.byref(size), 0)
assert size.value == STACK_BYTES, size.value
"""
    run(program)
