"""The conditions under which an audit asks its cases: {eager, graph} x {normal, zeroed}, and what keeps them honest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from deepstack_serving.audit.cases import AT_ONCE, Case
from deepstack_serving.audit_protocol import ALL_LAYERS, AUDIT_EXECUTION, AUDIT_ZERO


class Round(StrEnum):
    """One request after the other; the same after all other arms; some at the same time."""

    ALONE = "alone"
    AGAIN = "again"
    AT_ONCE = "at once"


@dataclass(frozen=True)
class Arm:
    """`zero` is what AUDIT_ZERO says, empty for features as they are."""

    execution: str
    zero: str = ""
    round: Round = Round.ALONE

    def __str__(self) -> str:
        zeroed = {"": "normal", ALL_LAYERS: "zeroed"}.get(self.zero, f"layer {self.zero} zeroed")
        return f"{self.execution}, {zeroed}, {self.round}"

    @property
    def parameters(self) -> dict[str, str]:
        """The request parameters."""
        return {AUDIT_EXECUTION: self.execution, **({AUDIT_ZERO: self.zero} if self.zero else {})}

    def cases(self, cases: Sequence[Case]) -> list[Case]:
        """Those that this arm asks."""
        if self.round is Round.AT_ONCE:
            return [case for case in cases if case.name in AT_ONCE]
        return [case for case in cases if case.pictures or self.zero in ("", ALL_LAYERS)]


def arms(executions: Sequence[str], deepstack_layers: Sequence[int]) -> tuple[Arm, ...]:
    """In the order in which they are asked: executions in turn, and normal again after everything else."""
    kinds = [("", Round.ALONE), (ALL_LAYERS, Round.ALONE), ("", Round.AT_ONCE), (ALL_LAYERS, Round.AT_ONCE)]
    kinds += [(str(layer), Round.ALONE) for layer in deepstack_layers]
    kinds += [("", Round.AGAIN)]
    return tuple(Arm(execution, *kind) for kind in kinds for execution in executions)
