"""Where a language stage stands among the others, as its config.pbtxt says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from deepstack_serving.checkpoint import Checkpoint
from deepstack_serving.injection import StagePlan, plan_stages
from deepstack_serving.pipelines import Pipelines
from deepstack_serving.settings import Settings


@dataclass(frozen=True)
class StagePlace:
    """Which of the language stages a model is, by its parameter `language_stage`."""

    pipelines: Pipelines
    pipeline: int
    index: int

    @staticmethod
    def parse(parameters: Mapping[str, str]) -> StagePlace:
        """Raises SettingsError when they are ill-formed."""
        pipelines = Pipelines.parse(parameters)
        return StagePlace(pipelines, *pipelines.place_of(parameters.get("language_stage", "")))

    @property
    def names(self) -> tuple[str, ...]:
        """The language stages of this pipeline, in order."""
        return self.pipelines.languages[self.pipeline]

    def plans(self, settings: Settings, checkpoint: Checkpoint) -> tuple[StagePlan, ...]:
        """The layers of each language stage; they are the same in every pipeline."""
        settings.check_devices(self.pipelines.models)
        return plan_stages(checkpoint.layer_count, len(self.names), settings.split_points, checkpoint.deepstack_layers)
