"""The models of a repository by name: one pipeline of encoder and language stages, or several alike.

Several serve more requests than one on several GPUs: each takes requests of its own, and its stages may be on any of
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from deepstack_serving.errors import SettingsError
from deepstack_serving.rules import integer
from deepstack_serving.wire import ORCHESTRATOR, VISION_ENCODER

STAGES, PIPELINES = "language_stages", "pipelines"  # parameters in a config.pbtxt
MAX_PIPELINES = 8
_COUNT = integer(1, MAX_PIPELINES)


@dataclass(frozen=True)
class Pipelines:
    """`stages` are the language stages of the first pipeline, in order; the names of the second end in `_p2`, ..."""

    stages: tuple[str, ...]
    count: int = 1

    @staticmethod
    def parse(parameters: Mapping[str, str]) -> Pipelines:
        """From a model's parameters. Raises SettingsError when they are ill-formed."""
        stages = tuple(name.strip() for name in parameters.get(STAGES, "").split(",") if name.strip())
        if not stages or len(set(stages)) != len(stages):
            raise SettingsError(
                f"config.pbtxt: parameter '{STAGES}' must list the language models, each once, in order"
            )
        text = parameters.get(PIPELINES, "1")
        try:
            return Pipelines(stages, _COUNT.parse(text))
        except ValueError as error:
            raise SettingsError(
                f"config.pbtxt: parameter '{PIPELINES}' is {text!r}; allowed: {_COUNT.allowed}"
            ) from error

    @property
    def encoders(self) -> tuple[str, ...]:
        """The vision encoder of each pipeline."""
        return tuple(self._named(VISION_ENCODER, number) for number in range(self.count))

    @property
    def languages(self) -> tuple[tuple[str, ...], ...]:
        """The language stages of each pipeline, in order."""
        return tuple(tuple(self._named(name, number) for name in self.stages) for number in range(self.count))

    @property
    def members(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Vision encoder and language stages of each pipeline."""
        return tuple(zip(self.encoders, self.languages, strict=True))

    @property
    def models(self) -> tuple[str, ...]:
        """All models of the repository."""
        return (*(name for encoder, stages in self.members for name in (encoder, *stages)), ORCHESTRATOR)

    def place_of(self, stage: str) -> tuple[int, int]:
        """(pipeline, index) of a language stage. Raises SettingsError for a name that is none."""
        for number, names in enumerate(self.languages):
            if stage in names:
                return number, names.index(stage)
        allowed = ", ".join(name for names in self.languages for name in names)
        raise SettingsError(f"config.pbtxt: parameter 'language_stage' is {stage!r}; allowed: one of {allowed}")

    @property
    def parameters(self) -> list[tuple[str, str]]:
        """What `parse` reads; one pipeline goes without saying."""
        count = [(PIPELINES, str(self.count))] if self.count > 1 else []
        return [(STAGES, ",".join(self.stages)), *count]

    def _named(self, name: str, number: int) -> str:
        return f"{name}_p{number + 1}" if number else name
