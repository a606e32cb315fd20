"""How many decode steps the stages may run by themselves: as many as cost nobody more than a short wait."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from deepstack_serving.engine.scheduler import Scheduler, Work
from deepstack_serving.engine.sequence import Status
from deepstack_serving.stages.info import StageInfo

STEPS_ON_GPUS = 8
SHARE_WHILE_ENCODING = 2
_ARRIVALS = 8  # that the rate of arrivals is taken from
_WEIGHT = 0.1  # of the latest step in the mean


class BurstPolicy:
    """A burst must not keep a request waiting that could start: requests that come meanwhile wait for its end.

    So there are no bursts while a request waits for blocks, short ones while images are being encoded, and when
    requests come often, none is longer than the mean time between two of them.
    """

    def __init__(self, setting: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._setting, self._clock = setting, clock
        self._arrivals_s: deque[float] = deque(maxlen=_ARRIVALS)
        self._step_s = 0.0

    def arrived(self) -> None:
        """A request came in."""
        self._arrivals_s.append(self._clock())

    def took(self, seconds: float, steps: int) -> None:
        """So long did the stages need for so many decode steps."""
        step_s = seconds / steps
        self._step_s += (step_s - self._step_s) * (_WEIGHT if self._step_s else 1.0)

    def steps(self, scheduler: Scheduler, work: Sequence[Work], stages: Sequence[StageInfo]) -> int:
        """Decode steps of this work. `stages` are the language stages."""
        limit = self._setting or (STEPS_ON_GPUS if all(info.device.startswith("cuda") for info in stages) else 1)
        encoding = sum(sequence.status is Status.ENCODING for sequence in scheduler.running)
        is_alone = len(work) + encoding == len(scheduler.running) and not scheduler.waiting and work[-1].decodes
        if limit == 1 or scheduler.groups > 1 or not is_alone:
            return 1
        if encoding:  # whose images may be ready at any moment
            limit = max(1, limit // SHARE_WHILE_ENCODING)
        left = min(item.sequence.max_tokens - len(item.sequence.output_ids) for item in work)
        return max(1, min(limit, left, self._between_arrivals(limit)))

    def _between_arrivals(self, limit: int) -> int:
        if len(self._arrivals_s) < _ARRIVALS or not self._step_s:
            return limit
        gap_s = (self._clock() - self._arrivals_s[0]) / _ARRIVALS
        return int(min(gap_s / self._step_s, limit))
