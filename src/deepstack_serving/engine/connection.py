"""The engine's knowledge of the stages: whether they are there, belong together, and still hold what they computed."""

from __future__ import annotations

import time

from deepstack_serving.engine.block_allocator import BlockAllocator
from deepstack_serving.engine.handshake import ask_stages, check_stages
from deepstack_serving.engine.pipeline import StagePipeline
from deepstack_serving.engine.ports import StagePort
from deepstack_serving.engine.scheduler import Scheduler
from deepstack_serving.errors import DeepstackError
from deepstack_serving.settings import Settings
from deepstack_serving.stages.info import StageInfo

REFRESH_INTERVAL_S = 0.5  # shorter than any stage takes to load: a replaced one is missed once before it is there


class Connection:
    """Opens by a handshake with every stage; after a failure it is open only if the same stage processes answer."""

    def __init__(self, port: StagePort, pipeline: StagePipeline, fingerprint: str) -> None:
        self._port, self._pipeline, self._fingerprint = port, pipeline, fingerprint
        self._infos: tuple[StageInfo, ...] = ()
        self._closed_since_s = self._asked_s = time.monotonic()
        self.reason = "no handshake yet"

    @property
    def is_open(self) -> bool:
        return bool(self._infos)

    @property
    def infos(self) -> tuple[StageInfo, ...]:
        """What the stages said of themselves, the encoder first; empty while it is not open."""
        return self._infos

    @property
    def closed_for_s(self) -> float:
        return 0.0 if self.is_open else time.monotonic() - self._closed_since_s

    def try_open(self) -> bool:
        """One handshake."""
        try:
            infos = ask_stages(self._port, self._pipeline.contract, self._pipeline.names, self._pipeline.plans)
            check_stages(infos, self._pipeline.plans, self._fingerprint)
            self._infos = infos
        except DeepstackError as error:
            if self._infos:
                self._infos, self._closed_since_s = (), time.monotonic()
            self.reason = str(error)
        self._asked_s = time.monotonic()
        return self.is_open

    def refresh(self) -> None:
        """Ask again from time to time. Only while nothing runs: a stage that was replaced then has lost nothing."""
        if self.is_open and time.monotonic() - self._asked_s > REFRESH_INTERVAL_S:
            self.try_open()

    def still_open(self) -> bool:
        """Whether the same stage processes as before still answer. A restarted stage has lost its KV pool."""
        before = self._infos
        self._infos, self._closed_since_s = (), time.monotonic()
        return self.try_open() and self._infos == before

    def make_scheduler(self, settings: Settings) -> Scheduler:
        """A scheduler whose blocks are counted at the first handshake (`size`)."""
        allocator = BlockAllocator(0, settings.block_size)
        return Scheduler(
            allocator, settings.max_running_requests, settings.max_waiting_requests, settings.prefill_token_budget
        )

    def size(self, allocator: BlockAllocator) -> None:
        """Give the allocator the blocks that every language stage has."""
        allocator.resize(min(info.blocks for info in self._infos[1:]))
