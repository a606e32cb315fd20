"""Whole runs of the local server, so that two of them can be compared: the same questions in the same batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.support.asking import MIXED, Answer, Ask, answer, ask_alone, ask_together, submit
from tests.support.local import Change, CollectingReply, LocalServer, keep, local_settings


@dataclass(frozen=True)
class Run:
    """The answers to MIXED in one batch, and one after the other."""

    together: list[Answer]
    alone: list[Answer]


def run(checkpoint: Path, stages: int = 2, change: Change = keep, **settings: object) -> Run:
    with LocalServer(local_settings(checkpoint, **settings), stages, change, held=True) as server:
        return Run(ask_together(server, MIXED), ask_alone(server, MIXED))


def run_staggered(checkpoint: Path, asks: Sequence[Ask], stages: int = 2, every: int = 2) -> list[Answer]:
    """A request arrives with every so-many-th step, while the earlier ones are being answered."""
    waiting, steps = list(asks), 0
    replies: list[CollectingReply] = []

    def arrive(_model: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
        nonlocal steps
        steps += name == "next_ids"
        if name == "next_ids" and steps % every == 0 and waiting:
            replies.append(submit(server, waiting.pop(0)))
        return tensor

    with LocalServer(local_settings(checkpoint), stages, arrive, held=True) as server:
        replies.append(submit(server, waiting.pop(0)))
        server.start()
        answers: list[Answer] = []
        while len(answers) < len(asks):  # a later reply is there before the earlier one has ended
            answers.append(answer(replies[len(answers)]))
    return answers
