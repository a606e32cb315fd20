"""Several decode steps in one call: each step follows from the one before and from what the other stages sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol

import torch

from deepstack_serving.injection import StagePlan
from deepstack_serving.stages.burst_call import ONE_STEP
from deepstack_serving.stages.call import LanguageCall

RunOne = Callable[[LanguageCall], Mapping[str, torch.Tensor]]


class Incoming(Protocol):
    """Where a stage gets its rows from: the stage before it, or the last one."""

    def receive(self, target: torch.Tensor) -> torch.Tensor:
        """The next message, of the target's shape, type and device."""


class Outgoing(Protocol):
    """Where a stage's rows go."""

    def send(self, tensor: torch.Tensor) -> None: ...


class Loop:
    """Both ends for a stage that holds all layers: its tokens come back to it."""

    def __init__(self) -> None:
        self._tensor: torch.Tensor | None = None

    def send(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def receive(self, target: torch.Tensor) -> torch.Tensor:
        return target if self._tensor is None else self._tensor


def run_burst(
    call: LanguageCall, plan: StagePlan, device: str, incoming: Incoming, outgoing: Outgoing, run_one: RunOne
) -> dict[str, torch.Tensor]:
    """Run all steps of a checked call. The last stage's outputs of the steps are joined, step after step.

    Raises StageError when another stage fails meanwhile.
    """
    steps = call.burst.steps
    answers: list[Mapping[str, torch.Tensor]] = []
    for step in range(steps):
        entering = _entering(call, plan, step, device, incoming)
        results = run_one(_call_of(call, step, entering))
        if not plan.is_last:
            outgoing.send(results["hidden_states"])
            continue
        answers.append(results)
        if step + 1 < steps:  # a token whose logits were not finite goes on as any other; nobody is told of it
            outgoing.send(results["next_ids"].clamp_min(0))
    if not plan.is_last:
        return {"hidden_states": results["hidden_states"][:0].clone()}
    return {name: torch.cat([answer[name] for answer in answers]) for name in answers[0]}


def _entering(
    call: LanguageCall, plan: StagePlan, step: int, device: str, incoming: Incoming
) -> Mapping[str, torch.Tensor]:
    """What the first layer of this stage takes in this step, by its tensor's name."""
    if plan.is_first:
        ids = call.tensors["input_ids"]
        return {"input_ids": incoming.receive(torch.empty_like(ids)) if step else ids}
    none = call.tensors["hidden_states"]
    rows = torch.empty(len(call.query_lengths), none.shape[1], dtype=none.dtype, device=device)
    return {"hidden_states": incoming.receive(rows)}


def _call_of(call: LanguageCall, step: int, entering: Mapping[str, torch.Tensor]) -> LanguageCall:
    """The call of one step: each sequence one token further, each seed one draw further."""
    tensors = {**call.tensors, **entering}
    if step:
        tensors["position_ids"] = tensors["position_ids"] + step
        tensors["context_lengths"] = tensors["context_lengths"] + step
    if step and "seed" in tensors:
        tensors["seed"] = tensors["seed"] + torch.tensor([0, step])
    contexts = [context + step for context in call.context_lengths]
    return replace(call, tensors=tensors, context_lengths=contexts, burst=ONE_STEP, continues=step > 0)
