"""Sequences as the scheduler sees them, without an engine around."""

from __future__ import annotations

import numpy as np

from deepstack_serving.engine.request import GenerationRequest
from deepstack_serving.engine.sampling_parameters import SamplingParameters
from deepstack_serving.engine.scheduler import Scheduler
from deepstack_serving.engine.sequence import Sequence
from deepstack_serving.media import MediaFiles
from deepstack_serving.prompt.placeholders import Prompt
from tests.support.local import CollectingReply


def sequence(prompt_tokens: int, max_tokens: int = 1, files: tuple[bytes, ...] = ()) -> Sequence:
    """A request of this many prompt tokens; with files it waits for its images once it is admitted."""
    nothing = np.zeros(0, dtype=np.int64)
    prompt = Prompt(np.arange(prompt_tokens), nothing, nothing, ())
    request = GenerationRequest("text", None, files, False, SamplingParameters(max_tokens=max_tokens))
    return Sequence(request, prompt, MediaFiles(files), CollectingReply(), deadline_s=float("inf"))


def advance(scheduler: Scheduler) -> list[tuple[Sequence, int, int]]:
    """Plan a step and record it as computed, as the engine does; a full sequence ends. Returns what was computed."""
    work = scheduler.plan()
    for item in work:
        item.sequence.computed = item.end
        if item.samples:
            item.sequence.output_ids.append(0)
            if len(item.sequence.output_ids) == item.sequence.max_tokens:
                scheduler.finish(item.sequence)
    return [(item.sequence, item.start, item.end) for item in work]
