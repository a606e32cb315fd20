"""How long to wait for a server that starts: the bookkeeping of `wait_until_ready`, without the waiting itself."""

from __future__ import annotations

import time

from deepstack_client.errors import ClientError, RequestTimeoutError

PROBE_TIMEOUT_S = 5.0
_PAUSE_S = 0.25


class ReadinessWait:
    """One wait; ask `pause_s` after each failed probe."""

    def __init__(self, model: str, timeout_s: float) -> None:
        self._model = model
        self._timeout_s = timeout_s
        self._deadline_s = time.monotonic() + timeout_s
        self.last_error: ClientError | None = None

    @property
    def probe_timeout_s(self) -> float:
        return max(0.001, min(PROBE_TIMEOUT_S, self._remaining_s))

    def pause_s(self) -> float:
        """Seconds to sleep before the next probe; raises when the time is over."""
        if self._remaining_s <= 0:
            reason = self.last_error or f"model {self._model} is not loaded yet"
            raise RequestTimeoutError(f"not ready after {self._timeout_s:g} s: {reason}")
        return min(_PAUSE_S, self._remaining_s)

    @property
    def _remaining_s(self) -> float:
        return self._deadline_s - time.monotonic()
