"""What `deepstack audit` and the orchestrator say to each other, beside an ordinary request and its answer.

All of it are request parameters, and one JSON text that answers a request with AUDIT_DESCRIBE.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

AUDIT_ZERO = "audit_zero"  # layers whose features this request has as zeros: ALL_LAYERS, or numbers with commas
AUDIT_EXECUTION = "audit_execution"  # EAGER or GRAPH
AUDIT_DESCRIBE = "audit_describe"  # true: nothing is generated; `text_output` is a ServerDescription
PARAMETERS = (AUDIT_ZERO, AUDIT_EXECUTION, AUDIT_DESCRIBE)

ALL_LAYERS = "all"
EAGER, GRAPH = "eager", "graph"
SETTING = "audit_parameters"


@dataclass(frozen=True)
class StageDescription:
    """One stage as it computes now; `dtype` is Triton's name. `compiled` is about its graphs."""

    model: str
    device: str
    dtype: str
    execution: str
    compiled: bool


@dataclass(frozen=True)
class ServerDescription:
    """The stages, the encoder first; a prefill step of more rows than `largest_prefill_graph` runs eagerly (0: all)."""

    deepstack_layers: tuple[int, ...]
    largest_prefill_graph: int
    stages: tuple[StageDescription, ...]

    @property
    def executions(self) -> tuple[str, ...]:
        """The executions that a request may ask for."""
        return (EAGER, GRAPH) if any(stage.execution == GRAPH for stage in self.stages[1:]) else (EAGER,)

    @property
    def is_compiled(self) -> bool:
        """Whether graphs compute by other kernels than eager steps, so that their results differ in the last bits."""
        return any(stage.compiled for stage in self.stages)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> ServerDescription:
        """Raises ValueError for a text of another version."""
        try:
            values = json.loads(text)
            stages = tuple(StageDescription(**stage) for stage in values.pop("stages"))
            layers = tuple(values.pop("deepstack_layers"))
            return ServerDescription(deepstack_layers=layers, stages=stages, **values)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{text[:80]!r} does not describe a server of this version") from error
