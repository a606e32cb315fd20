"""What a decode step costs in the two language stages alone: both run in this process, without Triton between them.

`python -m bench.stage_floor CHECKPOINT DTYPE ROWS` writes median microseconds per stage as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

from bench.figures import median
from bench.serving import MODELS
from deepstack_serving.checkpoint import open_checkpoint
from deepstack_serving.injection import plan_stages
from deepstack_serving.settings import parse_settings
from deepstack_serving.stages.language import LanguageStage

NAMES = MODELS[1:3]
_CONTEXT = 64
_STEPS = 64
_WARM_UP_STEPS = 8
_MICROSECONDS = 1e6


def load_stages(folder: Path, dtype: str) -> list[LanguageStage]:
    """The stages as the default repository splits them."""
    settings = parse_settings({"checkpoint": str(folder), "dtype": dtype, "device": "cpu"})
    checkpoint = open_checkpoint(settings.checkpoint, settings.dtype)
    plans = plan_stages(checkpoint.layer_count, len(NAMES), settings.split_points, checkpoint.deepstack_layers)
    return [LanguageStage(settings, checkpoint, plans, NAMES, index) for index in range(len(NAMES))]


def decode_layout(rows: int, context: int, axes: int, block_size: int) -> dict[str, torch.Tensor]:
    """One new token for each of `rows` sequences of `context` tokens."""
    blocks = -(-context // block_size)
    return {
        "position_ids": torch.full((axes, rows), context - 1),
        "query_lengths": torch.ones(rows, dtype=torch.int32),
        "context_lengths": torch.full((rows,), context, dtype=torch.int32),
        "block_tables": torch.arange(rows * blocks, dtype=torch.int32).reshape(rows, blocks),
    }


def measure(stages: list[LanguageStage], rows: int) -> dict[str, float]:
    """Median microseconds of each stage's `run` over decode steps of a growing context."""
    early, late = stages
    times: dict[str, list[float]] = {name: [] for name in NAMES}
    for step in range(_WARM_UP_STEPS + _STEPS):
        layout = decode_layout(rows, _CONTEXT + step, early.contract.position_axes, early.info.block_size)
        started_s = time.perf_counter()
        hidden = early.run({**layout, "input_ids": torch.full((rows,), step)}, ["hidden_states"])["hidden_states"]
        between_s = time.perf_counter()
        samples = {"sample_rows": torch.arange(rows)}
        late.run({**layout, **samples, "hidden_states": hidden}, ["next_ids", "logprobs"])
        if step >= _WARM_UP_STEPS:
            times[NAMES[0]].append(between_s - started_s)
            times[NAMES[1]].append(time.perf_counter() - between_s)
    return {name: median(values) * _MICROSECONDS for name, values in times.items()}


if __name__ == "__main__":
    print(json.dumps(measure(load_stages(Path(sys.argv[1]), sys.argv[2]), int(sys.argv[3]))))
