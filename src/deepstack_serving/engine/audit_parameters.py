"""The request parameters of `deepstack audit`: refused unless a setting allows them, then taken out of the others.

They switch features off, or graphs, for one request. A server that answers users leaves the setting off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deepstack_serving.audit_protocol import (
    ALL_LAYERS,
    AUDIT_DESCRIBE,
    AUDIT_EXECUTION,
    AUDIT_ZERO,
    EAGER,
    GRAPH,
    PARAMETERS,
    SETTING,
    ServerDescription,
    StageDescription,
)
from deepstack_serving.engine.connection import Connection
from deepstack_serving.engine.request import AuditOptions
from deepstack_serving.errors import InvalidRequestError, UnavailableError, shown
from deepstack_serving.rules import Rule, boolean, choice
from deepstack_serving.settings import Settings


class AuditParameters:
    """Reads the parameters, and describes the stages that the requests will meet."""

    def __init__(self, settings: Settings, deepstack_layers: Sequence[int], connection: Connection) -> None:
        self._allowed, self._layers, self._connection = settings.audit_parameters, tuple(deepstack_layers), connection
        self._largest_prefill_graph = max(settings.prefill_graph_tokens, default=0)

    def take(self, parameters: Mapping[str, Any]) -> tuple[AuditOptions, dict[str, Any]]:
        """The audit's parameters, and the others. Raises InvalidRequestError, or UnavailableError before a start."""
        others = {name: value for name, value in parameters.items() if name not in PARAMETERS}
        if len(others) == len(parameters):
            return AuditOptions(), others
        if not self._allowed:
            name = next(name for name in parameters if name in PARAMETERS)
            raise InvalidRequestError(
                f"unknown request parameter {name!r}: a server takes it only with the setting {SETTING!r} = true"
            )
        execution = _parse(parameters, AUDIT_EXECUTION, choice(EAGER, GRAPH))
        if execution == GRAPH:
            self._check_graphs()
        zeroed = _parse(parameters, AUDIT_ZERO, Rule(self._zeroed, self._layers_allowed()))
        return AuditOptions(
            zeroed or (), execution == EAGER, bool(_parse(parameters, AUDIT_DESCRIBE, boolean()))
        ), others

    def describe(self) -> ServerDescription:
        """The stages as they are now. Raises UnavailableError while they are not there."""
        infos = self._connection.infos
        if not infos:
            raise UnavailableError(f"the stages are not ready: {self._connection.reason}")
        stages = (
            StageDescription(info.model, info.device, info.dtype, info.execution, info.compiled) for info in infos
        )
        return ServerDescription(self._layers, self._largest_prefill_graph, tuple(stages))

    def _check_graphs(self) -> None:
        if GRAPH not in self.describe().executions:
            raise InvalidRequestError(
                f"request parameter {AUDIT_EXECUTION!r} is {GRAPH!r}, but no language stage of this server runs graphs "
                f"(setting 'execution'); allowed: {EAGER}"
            )

    def _layers_allowed(self) -> str:
        if not self._layers:
            return f"{ALL_LAYERS!r}; this checkpoint has no deepstack layers"
        return f"{ALL_LAYERS!r}, or numbers of {list(self._layers)} separated by commas"

    def _zeroed(self, value: Any) -> tuple[int, ...]:
        if value == ALL_LAYERS:
            return self._layers
        names = [item.strip() for item in str(value).split(",")]
        known = {str(layer): layer for layer in self._layers}
        if any(name not in known for name in names):
            raise ValueError(value)
        return tuple(known[name] for name in names)


def _parse(parameters: Mapping[str, Any], name: str, rule: Rule) -> Any:
    if name not in parameters:
        return None
    try:
        return rule.parse(parameters[name])
    except ValueError as error:
        raise InvalidRequestError(
            f"request parameter {name!r} is {shown(parameters[name])}; allowed: {rule.allowed}"
        ) from error
