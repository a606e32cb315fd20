"""A linked call, of one step or several decode steps: each takes what the stage before it sent, and the last tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from deepstack_serving.exchange import STEP_TIMEOUT_S, WAIT_TIMEOUT_S, BurstLinks
from deepstack_serving.injection import StagePlan
from deepstack_serving.stages.burst_call import ONE_STEP
from deepstack_serving.stages.call import LanguageCall

RunOne = Callable[[LanguageCall], Mapping[str, torch.Tensor]]
Entering = Callable[[LanguageCall], torch.Tensor]  # where a step's rows are to be received
TOKENS = ("next_ids", "logprobs")


class Tokens:
    """The last stage's tokens of each step: to the first stage, and to the orchestrator."""

    def __init__(self, links: BurstLinks) -> None:
        self._links = links
        self._likes: tuple[torch.Tensor, torch.Tensor] | None = None

    def put(self, ids: torch.Tensor, logprobs: torch.Tensor) -> None:
        """Of one step; they may be views of what the next step rewrites."""
        self._likes = ids, logprobs
        self._links.outgoing.send(ids)
        self._links.logprobs.send(logprobs)

    def close(self) -> dict[str, torch.Tensor]:
        """Those of all steps, one step after the other, on the host."""
        if self._likes is None:
            return {}
        links = (self._links.outgoing, self._links.logprobs)
        return {name: torch.cat(link.sent(like)) for name, link, like in zip(TOKENS, links, self._likes, strict=True)}


class LateTokens(Tokens):
    """Those of a stage that holds all layers: a step's tokens are published while the next step runs."""

    def __init__(self, links: BurstLinks, device: str) -> None:
        super().__init__(links)
        self._arrived = torch.cuda.Event() if device != "cpu" else None  # type: ignore[no-untyped-call]

    def put(self, ids: torch.Tensor, logprobs: torch.Tensor) -> None:
        self._publish()
        self._likes = ids, logprobs
        self._links.outgoing.post(ids)
        self._links.logprobs.post(logprobs)
        if self._arrived:
            self._arrived.record()

    def close(self) -> dict[str, torch.Tensor]:
        self._publish()
        return super().close()

    def _publish(self) -> None:
        if self._likes is None:
            return
        if self._arrived:
            self._arrived.synchronize()
        for link, like in zip((self._links.outgoing, self._links.logprobs), self._likes, strict=True):
            link.publish(like)


def run_burst(
    call: LanguageCall, plan: StagePlan, device: str, links: BurstLinks, entering: Entering, run_one: RunOne
) -> dict[str, torch.Tensor]:
    """Run the steps of a checked call, until the orchestrator wants no more. The last stage's outputs of the steps are
    joined, step after step.

    Raises StageError when another stage fails meanwhile.
    """
    is_alone = plan.is_first and plan.is_last
    tokens = LateTokens(links, device) if is_alone else Tokens(links)
    timeout_s = WAIT_TIMEOUT_S if call.burst.steps > 1 else STEP_TIMEOUT_S
    answers: list[Mapping[str, torch.Tensor]] = []
    results: Mapping[str, torch.Tensor] = {}
    for step in range(call.burst.steps):
        one = _call_of(call, step)
        if step or not plan.is_first:
            target = entering(one)
            one = replace(one, tensors={**one.tensors, "input_ids" if plan.is_first else "hidden_states": target})
            if is_alone:
                target.copy_(results["next_ids"])
            has_rows = is_alone or links.incoming.receive(target, timeout_s)
            if not has_rows or (plan.is_first and links.is_ending):
                if not plan.is_last:
                    links.outgoing.send_end()
                break
        results = run_one(one)
        if plan.is_last:
            tokens.put(results["next_ids"], results["logprobs"])
            answers.append({name: tensor for name, tensor in results.items() if name not in TOKENS})
        else:
            links.outgoing.send(results["hidden_states"])
    return _answer(tokens, answers, results)


def _answer(
    tokens: Tokens, answers: list[Mapping[str, torch.Tensor]], last: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    if not answers:
        return {"hidden_states": last["hidden_states"][:0].clone()}
    return {**tokens.close(), **{name: torch.cat([answer[name] for answer in answers]) for name in answers[0]}}


def _call_of(call: LanguageCall, step: int) -> LanguageCall:
    """The call of one step: each sequence one token further, each seed one draw further."""
    if not step:
        return replace(call, burst=ONE_STEP)
    tensors = dict(call.tensors)
    tensors["position_ids"] = tensors["position_ids"] + step
    tensors["context_lengths"] = tensors["context_lengths"] + step
    if "seed" in tensors:
        tensors["seed"] = tensors["seed"] + torch.tensor([0, step])
    contexts = [context + step for context in call.context_lengths]
    return replace(call, tensors=tensors, context_lengths=contexts, burst=ONE_STEP, continues=True)
