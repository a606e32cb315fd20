"""A call of several decode steps: what must hold of its tensors beyond what holds of every call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from deepstack_serving.errors import WireError
from deepstack_serving.exchange import MAX_DECODE_STEPS
from deepstack_serving.injection import StagePlan
from deepstack_serving.wire import DECODE_STEPS, EXCHANGE, FORCED_IDS, IMAGE_ROWS, SAMPLE_ROWS


@dataclass(frozen=True)
class Burst:
    """Decode steps of one call, and of several the ticket of their exchange."""

    steps: int
    ticket: str = ""


ONE_STEP = Burst(1)


def burst_of(tensors: Mapping[str, torch.Tensor]) -> Burst:
    """Raises WireError for a number that is not allowed, and for an exchange that is missing or has no use."""
    steps = int(tensors[DECODE_STEPS.name]) if DECODE_STEPS.name in tensors else 1
    if not 1 <= steps <= MAX_DECODE_STEPS:
        raise WireError(f"tensor {DECODE_STEPS.name!r} is {steps}; allowed: 1 to {MAX_DECODE_STEPS}")
    if (steps > 1) != (EXCHANGE.name in tensors):
        raise WireError(
            f"tensor {EXCHANGE.name!r} {'is missing' if steps > 1 else 'came without use'}: the call has {steps} "
            "decode steps"
        )
    return ONE_STEP if steps == 1 else Burst(steps, bytes(tensors[EXCHANGE.name].tolist()).decode(errors="replace"))


def check_burst(
    tensors: Mapping[str, torch.Tensor], plan: StagePlan, rows: int, sequences: int, *, stateless: bool
) -> None:
    """One new row for each sequence, each of them sampled, and nothing that only a single step can take."""
    steps = f"with several {DECODE_STEPS.name!r}"
    if rows != sequences or sequences == 0:
        raise WireError(f"tensor 'query_lengths' must be 1 for every sequence {steps}, and there must be one at least")
    if stateless:
        raise WireError(f"tensor 'block_tables' is missing {steps}")
    for name in (IMAGE_ROWS.name, FORCED_IDS.name):
        if name in tensors and len(tensors[name]):
            raise WireError(f"tensor {name!r} is not taken {steps}")
    if plan.is_last and tensors[SAMPLE_ROWS.name].tolist() != list(range(rows)):
        raise WireError(f"tensor {SAMPLE_ROWS.name!r} must name every row in order {steps}")
    entering, sent = ("input_ids", rows) if plan.is_first else ("hidden_states", 0)
    if len(tensors[entering]) != sent:
        raise WireError(f"tensor {entering!r} has {len(tensors[entering])} rows; {sent} are expected {steps}")
