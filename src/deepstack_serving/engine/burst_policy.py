"""How many decode steps the stages may run by themselves, and when that must end: nobody waits for more than a step.

Tokens go out as they come. A burst ends early when another request can run (its image is encoded, or it has none), when
one ended whose place another waits for, and when many ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from deepstack_serving.engine.inbox import Inbox
from deepstack_serving.engine.scheduler import Scheduler, Work
from deepstack_serving.exchange import MAX_DECODE_STEPS
from deepstack_serving.stages.info import StageInfo

LONGEST_S = 1.0  # what the engine does from time to time can wait for so long
STEPS_WITH_ALTERNATIVES = 8  # they come at the end of a burst, for whoever asked for them
_ENDED_SHARE = 8  # of the rows of a burst: when one in so many computes nothing any more, a smaller one is cheaper


class BurstPolicy:
    """`setting`: the most steps; 0 is automatic."""

    def __init__(self, setting: int, inbox: Inbox, clock: Callable[[], float] = time.monotonic) -> None:
        self._setting, self._inbox, self._clock = setting, inbox, clock
        self._began_s = 0.0

    def limit(self, stages: Sequence[StageInfo]) -> int:
        """The most decode steps of any burst; 1: there are none. `stages` are the language stages."""
        on_gpus = all(info.device.startswith("cuda") for info in stages)
        return self._setting or (MAX_DECODE_STEPS if on_gpus else 1)

    def steps(self, work: Sequence[Work], stages: Sequence[StageInfo]) -> int:
        """The most decode steps of this work."""
        limit = self.limit(stages)
        if limit == 1 or not work[-1].decodes:
            return 1
        self._began_s = self._clock()
        if any(item.sequence.request.sampling.logprobs for item in work):
            limit = min(limit, STEPS_WITH_ALTERNATIVES)
        left = min(item.sequence.max_tokens - len(item.sequence.output_ids) for item in work)
        return max(1, min(limit, left))

    def must_end(self, scheduler: Scheduler, ended: int, rows: int) -> bool:
        """Whether a burst of so many rows, of which some have ended, should run no further step."""
        if self._inbox.is_closed or scheduler.has_newcomers or self._clock() - self._began_s > LONGEST_S:
            return True
        return ended > 0 if scheduler.waiting else ended * _ENDED_SHARE >= rows
