"""A linked call, and one of several decode steps: what must hold of its tensors beyond what holds of every call."""

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
    """Decode steps of one call, and the ticket of its exchange, which a single step may do without."""

    steps: int
    ticket: str = ""

    @property
    def is_linked(self) -> bool:
        return bool(self.ticket)


ONE_STEP = Burst(1)


def burst_of(tensors: Mapping[str, torch.Tensor]) -> Burst:
    """Raises WireError for a number that is not allowed, and for an exchange that is missing."""
    steps = int(tensors[DECODE_STEPS.name]) if DECODE_STEPS.name in tensors else 1
    if not 1 <= steps <= MAX_DECODE_STEPS:
        raise WireError(f"tensor {DECODE_STEPS.name!r} is {steps}; allowed: 1 to {MAX_DECODE_STEPS}")
    if EXCHANGE.name in tensors:
        return Burst(steps, bytes(tensors[EXCHANGE.name].tolist()).decode(errors="replace") or "none")
    if steps > 1:
        raise WireError(f"tensor {EXCHANGE.name!r} is missing: the call has {steps} decode steps")
    return ONE_STEP


def check_link(tensors: Mapping[str, torch.Tensor], plan: StagePlan, rows: int, *, has_features: bool) -> None:
    """Rows come with the call to the first stage, and to the others over the exchange."""
    entering, sent = ("input_ids", rows) if plan.is_first else ("hidden_states", 0)
    if len(tensors[entering]) != sent:
        count = len(tensors[entering])
        raise WireError(f"tensor {entering!r} has {count} rows; {sent} are expected with {EXCHANGE.name!r}")
    if has_features and plan.forwarded:
        raise WireError(
            f"tensor {EXCHANGE.name!r} came with features for the layers {list(plan.forwarded)} of later stages, which "
            "were called already"
        )


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
