"""Where a language stage stands among the others, as its config.pbtxt says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from deepstack_serving.checkpoint import Checkpoint
from deepstack_serving.errors import SettingsError
from deepstack_serving.injection import StagePlan, plan_stages
from deepstack_serving.settings import Settings
from deepstack_serving.wire import ORCHESTRATOR, VISION_ENCODER


@dataclass(frozen=True)
class StagePlace:
    """Which of the language stages a model is: parameters `language_stages` (names in order) and `language_stage`."""

    names: tuple[str, ...]
    index: int

    @staticmethod
    def parse(parameters: Mapping[str, str]) -> StagePlace:
        names, name = stage_names(parameters), parameters.get("language_stage", "")
        if name not in names:
            raise SettingsError(
                f"config.pbtxt: parameter 'language_stage' is {name!r}; allowed: one of {', '.join(names)}"
            )
        return StagePlace(names, names.index(name))

    def plans(self, settings: Settings, checkpoint: Checkpoint) -> tuple[StagePlan, ...]:
        settings.check_devices((VISION_ENCODER, *self.names, ORCHESTRATOR))
        return plan_stages(checkpoint.layer_count, len(self.names), settings.split_points, checkpoint.deepstack_layers)


def stage_names(parameters: Mapping[str, str]) -> tuple[str, ...]:
    """The language stages that a model's parameters list, in order. Raises SettingsError when they are ill-formed."""
    names = tuple(name.strip() for name in parameters.get("language_stages", "").split(",") if name.strip())
    if not names or len(set(names)) != len(names):
        raise SettingsError(
            "config.pbtxt: parameter 'language_stages' must list the language models, each once, in order"
        )
    return names
