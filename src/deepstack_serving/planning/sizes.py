"""Parameter bytes of stages, read off the modules that the loader would fill."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from torch import nn

from deepstack_serving.checkpoint import Checkpoint
from deepstack_serving.injection import StagePlan
from deepstack_serving.stages.loading import stage_skeleton


@dataclass(frozen=True)
class Parts:
    """Bytes of what a language stage consists of, so that the bytes of any stage are a sum of them.

    A tied head is the embedding matrix, which is then in `first` and in `last`; a single stage has it once.
    """

    vision: int
    first: int
    last: int
    every: int
    layers: tuple[int, ...]


def parameter_bytes(module: nn.Module) -> int:
    """Bytes of a module's parameters, shared ones once."""
    return sum(value.nbytes for value in module.parameters())


def stage_bytes(checkpoint: Checkpoint, plan: StagePlan | None) -> int:
    """Bytes of the parameters that one stage loads; None is the vision encoder."""
    return parameter_bytes(stage_skeleton(checkpoint, plan))


def measure(checkpoint: Checkpoint) -> Parts:
    """The parts of a checkpoint, read off a single stage."""
    model = cast(Any, stage_skeleton(checkpoint, StagePlan(0, 1, 0, checkpoint.layer_count, ())))
    text = checkpoint.family.text_model(model)
    layers = tuple(map(parameter_bytes, text.layers))
    first, last = parameter_bytes(text.embed_tokens), parameter_bytes(nn.ModuleList([text.norm, model.lm_head]))
    named = parameter_bytes(nn.ModuleList([text.embed_tokens, text.norm, model.lm_head]))
    every = parameter_bytes(model) - named - sum(layers)
    return Parts(stage_bytes(checkpoint, None), first, last, every, layers)
