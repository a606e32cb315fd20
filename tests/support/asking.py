"""Questions for tests: pictures made on the spot, and the whole of an answer in a form that can be compared exactly."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from tests.support.local import CollectingReply, LocalServer

NEW_TOKENS = 8
TOP = 20


@dataclass(frozen=True)
class Ask:
    """One user turn: the images and videos, then the text. `order` names their kinds; else images come first.

    `sampling` is what the request says of its videos: inputs `video_fps` or `video_num_frames`.
    """

    text: str
    images: tuple[bytes, ...] = ()
    videos: tuple[bytes, ...] = ()
    order: tuple[str, ...] = ()
    sampling: tuple[tuple[str, float], ...] = ()

    @property
    def messages(self) -> list[dict[str, Any]]:
        kinds = self.order or ("image",) * len(self.images) + ("video",) * len(self.videos)
        content: list[dict[str, str]] = [{"type": kind} for kind in kinds]
        return [{"role": "user", "content": [*content, {"type": "text", "text": self.text}]}]

    @property
    def inputs(self) -> dict[str, list[Any]]:
        """The orchestrator's inputs; a turn of another order than the usual one goes as `messages`."""
        prompt = {"messages": [json.dumps(self.messages)]} if self.order else {"text_input": [self.text]}
        media = {"image": list(self.images), "video": list(self.videos)}
        media = {name: files for name, files in media.items() if files}
        return {**prompt, **media, **{name: [value] for name, value in self.sampling}}


@dataclass(frozen=True)
class Answer:
    """Token ids, their log-probabilities, and per token the best alternatives with theirs."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top: tuple[tuple[tuple[int, float], ...], ...]

    def distance(self, other: Answer) -> float:
        """Largest difference of the log-probabilities of the same tokens, chosen or alternative."""
        chosen = (abs(mine - theirs) for mine, theirs in zip(self.logprobs, other.logprobs, strict=True))
        return max(*chosen, self.top_distance(other))

    def top_distance(self, other: Answer) -> float:
        """Largest difference of the log-probabilities of alternatives that both answers name; infinite if none."""
        pairs = zip(map(dict, self.top), map(dict, other.top), strict=True)
        shared = ((mine, theirs, token) for mine, theirs in pairs for token in mine.keys() & theirs.keys())
        return max((abs(mine[token] - theirs[token]) for mine, theirs, token in shared), default=math.inf)


def picture(width: int, height: int, seed: int = 0) -> bytes:
    """A PNG file of coloured noise over a gradient."""
    noise = np.random.default_rng(seed).integers(0, 128, (height, width, 3))
    ramp = np.linspace(0, 127, width)[None, :, None]
    file = io.BytesIO()
    Image.fromarray((noise + ramp).astype(np.uint8)).save(file, format="PNG")
    return file.getvalue()


TEXT = Ask("hello the quick fox")
ONE_IMAGE = Ask("describe the image", (picture(100, 70, 1),))
THREE_IMAGES = Ask("compare the pictures", (picture(64, 64, 2), picture(130, 66, 3), picture(60, 180, 4)))
MIXED = (TEXT, ONE_IMAGE, THREE_IMAGES)


def submit(server: LocalServer, ask: Ask, **sampling: Any) -> CollectingReply:
    """Greedy and without an end unless `sampling` says otherwise."""
    return server.submit(request_inputs(ask, **sampling))


def request_inputs(ask: Ask, **sampling: Any) -> dict[str, list[Any]]:
    """What `submit` sends."""
    chosen = {"max_tokens": NEW_TOKENS, "ignore_eos": True, "logprobs": TOP, "temperature": 0, **sampling}
    return {**ask.inputs, "sampling_parameters": [json.dumps(chosen)]}


def answer(reply: CollectingReply) -> Answer:
    """The whole answer, once the final response came. Raises the error that the request ended with."""
    reply.wait()
    if reply.error is not None:
        raise reply.error
    tokens = reply.tokens
    return Answer(
        tuple(token["token_id"] for token in tokens),
        tuple(token["logprob"] for token in tokens),
        tuple(tuple((item["token_id"], item["logprob"]) for item in token["top_logprobs"]) for token in tokens),
    )


def ask_together(server: LocalServer, asks: Sequence[Ask], **sampling: Any) -> list[Answer]:
    """Submit all, then start the server if it is held: the batches are the same in every run."""
    replies = [submit(server, ask, **sampling) for ask in asks]
    server.start()
    return [answer(reply) for reply in replies]


def ask_alone(server: LocalServer, asks: Sequence[Ask], **sampling: Any) -> list[Answer]:
    """One after the other."""
    server.start()
    return [answer(submit(server, ask, **sampling)) for ask in asks]
