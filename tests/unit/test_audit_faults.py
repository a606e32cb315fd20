"""The whole audit over the real engine and stages: it passes, and fails as soon as one safeguard is taken away.

A CPU captures no graphs; here they are calls over the same slots (tests/support/graphs.py).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from deepstack_serving.audit.verdict import Audit, Verdict
from deepstack_serving.execution.slots import Scattered, Slot, Value
from tests.support.graphs import capture, paged_attention_on_cpu
from tests.support.local import Change, LocalServer, keep, local_settings
from tests.support.local_client import audit

Write = Callable[[Slot, Value], None]
write = Slot.write


def dropped_add(slot: Slot, _value: Value) -> None:
    """What the layers add in a graph is nothing."""
    write(slot, None)


def stale_tail(slot: Slot, value: Value) -> None:
    """What an earlier tensor left behind a shorter one stays, and all of it where there is none."""
    if isinstance(value, Scattered):
        slot.buffer.index_copy_(0, value.rows, value.values.index_select(0, value.sources))


def zeroed_on_mismatch(slot: Slot, value: Value) -> None:
    """What does not fit is taken for nothing; here everything beyond 128 rows."""
    write(slot, value if value is None or value.shape[0] <= 128 else None)


def cleared_views(model: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The first stage forwards views of features, which it clears before they are sent, graphs or not."""
    return torch.zeros_like(tensor) if model == "language_early" and name.startswith("ds_") else tensor


def audited(checkpoint: Path, change: Change = keep) -> Audit:
    """Layers 0 and 1 in the first stage; the features of layer 2 cross to the second."""
    sizes = {"decode_batch_sizes": "1,2,4,8", "prefill_graph_tokens": "128,256,512"}
    settings = local_settings(checkpoint, audit_parameters=True, split_points=2, **sizes)
    with paged_attention_on_cpu(), LocalServer(settings, change=change) as server:
        return audit(capture(server))


def test_sound_graphs_pass(checkpoint: Path) -> None:
    found = audited(checkpoint)
    assert (found.verdict, found.reasons) == (Verdict.PASS, ())
    assert sum(check.title.startswith("graph as eager") for check in found.checks) == 5


@pytest.mark.parametrize("fault", [dropped_add, stale_tail, zeroed_on_mismatch])
def test_graphs_without_a_safeguard_fail(fault: Write, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(slot: Slot, value: Value) -> None:
        (fault if slot.spec.name.startswith("ds_") else write)(slot, value)

    monkeypatch.setattr(Slot, "write", faulty)
    found = audited(checkpoint)
    assert found.verdict is Verdict.FAIL
    assert any(reason.startswith("graph as eager, normal: answers differ") for reason in found.reasons), found.reasons
    assert not any(reason.startswith("eager") for reason in found.reasons), found.reasons


def test_cleared_views_leave_a_layer_without_effect(checkpoint: Path) -> None:
    found = audited(checkpoint, cleared_views)
    assert found.verdict is Verdict.VACUOUS
    reason = "normal unlike ds_2 zeroed: zeroing this layer changes nothing"
    assert found.reasons == (f"eager: {reason}", f"graph: {reason}")
