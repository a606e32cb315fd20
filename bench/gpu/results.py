"""What runs have recorded, of one call or merged from several: look figures up by arm, server and phase."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.failures import BenchError
from bench.gpu.targets import WARM_START, Target

SERVER, EAGER, STATIC, BATCHED, LIMITS, VLLM = (
    "server",
    "generate eager",
    "generate static",
    "generate batched",
    "limits",
    "vllm",
)


@dataclass(frozen=True)
class Arm:
    """One arm's record with the run that it belongs to."""

    record: Mapping[str, Any]
    run: Mapping[str, Any]

    @property
    def name(self) -> str:
        return str(self.record["arm"])

    @property
    def stages(self) -> int:
        return int(self.record.get("stages", 0))

    @property
    def pipelines(self) -> int:
        return int(self.record.get("pipelines", 1))

    @property
    def gpus(self) -> int:
        """How many GPUs the settings name; one where they name none."""
        settings = self.record.get("settings", {})
        named = re.findall(r"cuda:\d+", f"{settings.get('devices', '')},{settings.get('device', '')}")
        return len(set(named)) or 1

    @property
    def label(self) -> str:
        """The server's stages and GPUs and those settings that the benchmark did not choose by itself."""
        chosen = self.record.get("chosen", {})
        parts = [f"{self.stages} language stage{'s' * (self.stages > 1)}", f"{self.gpus} GPU{'s' * (self.gpus > 1)}"]
        parts += [f"{self.pipelines} pipelines"] if self.pipelines > 1 else []
        return ", ".join([*parts, *(f"{key}={value}" for key, value in chosen.items())])

    def phases(self) -> dict[str, Any]:
        """Results by phase, failed ones left out, and the last start that found compiled code."""
        found = {phase["phase"]: phase["result"] for phase in self.record["phases"] if "result" in phase}
        starts = [result for name, result in found.items() if name.startswith("start ")]
        warm = [start for start in starts if start.get("compiled_code_was_there", self.name == VLLM)]
        return {**found, WARM_START: warm[-1]} if warm else found

    def failures(self) -> list[tuple[str, str]]:
        """What failed, by phase; the arm itself last."""
        failed = [(phase["phase"], phase["error"]) for phase in self.record["phases"] if "error" in phase]
        return [*failed, ("the arm", self.record["error"])] if "error" in self.record else failed


class Results:
    """All runs of one shape, in the order in which they were given: later ones win."""

    def __init__(self, runs: Sequence[Mapping[str, Any]]) -> None:
        self.runs = runs
        self.arms = [Arm(record, run) for run in runs for record in run["arms"]]

    def named(self, name: str) -> list[Arm]:
        return [arm for arm in self.arms if arm.name == name]

    def phase(self, name: str, phase: str) -> Any:
        """The last result of a phase of an arm, None where there is none."""
        found = [arm.phases()[phase] for arm in self.named(name) if phase in arm.phases()]
        return found[-1] if found else None

    def peer(self, name: str, target: Target) -> float | None:
        """A target's figure as another arm than the server has it."""
        return _last(target, self.named(name))

    def measured(self, target: Target) -> float | None:
        """A target's figure as the server with its stages, GPUs and pipelines has it."""
        wanted = (target.stages, target.gpus, target.pipelines)
        return _last(target, (arm for arm in self.named(SERVER) if (arm.stages, arm.gpus, arm.pipelines) == wanted))

    @property
    def floor_ms(self) -> float | None:
        """The time to read once what a decode step must read, at the copy bandwidth that was measured."""
        copy = self.phase(LIMITS, "copy")
        sizes = [run["checkpoint"]["bytes_read_per_step"] for run in self.runs if run.get("checkpoint")]
        return 1e3 * sizes[-1] / copy["bytes_per_s"] if copy and sizes else None


def _last(target: Target, arms: Iterable[Arm]) -> float | None:
    values = [target.value(arm.phases()) for arm in arms]
    return next((value for value in reversed(values) if value is not None), None)


def read_runs(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """The runs of several files. Raises BenchError for a file that is none of this benchmark's."""
    runs: list[dict[str, Any]] = []
    for path in paths:
        try:
            runs += json.loads(path.read_text())["runs"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BenchError(f"{path} holds no results of this benchmark: {error!r}") from error
    return runs


def by_shape(runs: Sequence[Mapping[str, Any]]) -> dict[str, Results]:
    """Results of each shape, in the order of their first runs."""
    return {
        shape: Results([run for run in runs if run["shape"] == shape])
        for shape in dict.fromkeys(run["shape"] for run in runs)
    }
