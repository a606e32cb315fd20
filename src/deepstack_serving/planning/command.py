"""The command `deepstack plan`: how a checkpoint divides over stages and GPUs, from its config alone."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from deepstack_serving.command_line import add_stage_arguments, check_split, refusing, setting
from deepstack_serving.planning import GIBIBYTE
from deepstack_serving.settings import DTYPES, PREFIX, Settings


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the `deepstack` command line."""
    parser = subparsers.add_parser("plan", help="show how a checkpoint divides over stages and GPUs")
    parser.add_argument(
        "checkpoint", type=Path, metavar="CHECKPOINT", help="a folder with config.json; no weights needed"
    )
    add_stage_arguments(parser)
    parser.add_argument(
        "--gpu-memory-gib", type=_memory, default=(), metavar="24,24", help="memory of each GPU, to see what fits"
    )
    parser.add_argument(
        "--kv-memory-fraction",
        type=setting("kv_memory_fraction"),
        default=Settings.kv_memory_fraction,
        metavar="F",
        help=f"same as {PREFIX}KV_MEMORY_FRACTION (%(default)s)",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help=f"same as {PREFIX}DTYPE (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object, sizes in bytes")
    parser.set_defaults(run=refusing(run))


def run(arguments: argparse.Namespace) -> int:
    """Exit code 0, or 1 with a warning on standard error for each GPU that is too small."""
    from deepstack_serving.checkpoint import open_config  # slow to import
    from deepstack_serving.planning.deployment import GpuMemory, plan_deployment
    from deepstack_serving.planning.display import as_json, as_text, warnings

    check_split(arguments)
    memory = GpuMemory(arguments.gpu_memory_gib, arguments.kv_memory_fraction)
    checkpoint = open_config(arguments.checkpoint, arguments.dtype)
    plan = plan_deployment(checkpoint, arguments.stages, arguments.split, memory)
    sys.stdout.write(as_json(plan) if arguments.json else as_text(plan))
    sys.stderr.writelines(f"warning: {text}\n" for text in warnings(plan))
    return 0 if plan.fits else 1


def _memory(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(float(item) * GIBIBYTE) for item in text.split(","))
    except (ValueError, OverflowError):
        sizes = (0,)
    if min(sizes) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of sizes in GiB, as in 24,24")
    return sizes
