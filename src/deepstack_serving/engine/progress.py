"""Record what a step computed for one sequence: its new tokens, and whether they end it."""

from __future__ import annotations

from collections.abc import Collection

from deepstack_serving.engine.events import Event, Failure, Tokens
from deepstack_serving.engine.pipeline import StepTokens
from deepstack_serving.engine.scheduler import Work
from deepstack_serving.errors import StageError

NOT_FINITE = StageError("the model's logits are not finite; this request cannot be answered")


def record(item: Work, result: StepTokens, row: int, eos: Collection[int]) -> list[Event]:
    """Take the tokens of a sampled row up to the one that ends the answer; what a burst computed beyond is dropped.

    The sequence is over when the last event says so, or is a failure.
    """
    sequence, ids, logprobs = item.sequence, result.ids[row], result.logprobs[row]
    sampling = sequence.request.sampling
    sequence.features = None
    sequence.computed = item.end + len(ids) - 1
    count, ends_with_eos = _answered(ids, () if sampling.ignore_eos else eos)
    if count < len(ids):
        events: list[Event] = [] if ends_with_eos else [Failure(sequence, NOT_FINITE)]
        ids, logprobs = ids[:count], logprobs[:count]
        if not count:
            return events
    else:
        events = []
    sequence.output_ids += ids
    reason = "stop" if ends_with_eos else "length" if len(sequence.output_ids) >= sequence.max_tokens else None
    top = result.top(row, sampling.logprobs)[:count] if sampling.logprobs else ()
    return [Tokens(sequence, ids, logprobs, top, reason, ends_with_eos), *events]


def _answered(ids: list[int], eos: Collection[int]) -> tuple[int, bool]:
    """How many of the tokens belong to the answer, and whether the last of those is an end of sequence."""
    for place, token_id in enumerate(ids):
        if token_id < 0:
            return place, False
        if token_id in eos:
            return place + 1, True
    return len(ids), False
