"""Encode requests' images and videos beside the engine thread, and compute the rotary positions that they give.

On a GPU, images of requests that wait together are encoded together: a step takes features of one call of the encoder
at a time, so what one call gave can also be prefilled together. A call also names the images that the next one will
probably hold, which are decoded while the GPU computes.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from deepstack_serving.checkpoint import Checkpoint
from deepstack_serving.engine.ports import Array, StagePort
from deepstack_serving.engine.sequence import EncodedBatch, Features, Sequence, Status
from deepstack_serving.errors import CancelledError, DeepstackError, InvalidRequestError, StageError
from deepstack_serving.families.base import Positions
from deepstack_serving.media import MediaFiles
from deepstack_serving.wire import IMAGE_GRID, IMAGE_TOKENS, VIDEO_GRID, VIDEO_TOKENS, deepstack_name

Done = Callable[[Sequence, Features | DeepstackError], None]
_SURPRISE = StageError("the images or videos could not be encoded; the server's log says why")


@dataclass(frozen=True)
class _Waiting:
    sequence: Sequence
    done: Done


class Encoder:
    """A few threads that call the vision encoder; every submitted request ends in exactly one call of `done`.

    `batch_tokens`: the prompts of waiting requests whose images go into one call have so many tokens at most, so that
    one step can compute them together; 0: one request a call.
    """

    def __init__(self, port: StagePort, checkpoint: Checkpoint, threads: int) -> None:
        self.batch_tokens = 0
        self._port, self._checkpoint = port, checkpoint
        contract = checkpoint.contract
        names = [deepstack_name(layer) for layer in contract.deepstack_layers]
        self._features = [*(["image_embeds"] if contract.has_image_embeds else []), *names]
        videos = (VIDEO_GRID, VIDEO_TOKENS) if contract.has_video else ()
        self._sizes = [spec.name for spec in (IMAGE_GRID, IMAGE_TOKENS, *videos)]
        self._waiting: deque[_Waiting] = deque()
        self._coming: tuple[Sequence, ...] = ()
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="encode")

    def submit(self, sequences: Iterable[Sequence], done: Done, coming: Iterable[Sequence] = ()) -> None:
        """Encode in the background; those that come together go into one call where they fit. `coming`: those that are
        to follow soon, the next first.
        """
        for _ in range(self.enqueue(sequences, done, coming)):
            self._pool.submit(self.run_next).add_done_callback(_report_surprise)

    def enqueue(self, sequences: Iterable[Sequence], done: Done, coming: Iterable[Sequence] = ()) -> int:
        """Let them wait for calls of `run_next`; says how many they are."""
        new = [_Waiting(sequence, done) for sequence in sequences]
        with self._lock:  # else a thread could take the first of them alone
            self._waiting.extend(new)
            self._coming = tuple(coming)
        return len(new)

    @property
    def waiting(self) -> int:
        """Requests that no call has taken yet."""
        return len(self._waiting)

    def close(self) -> None:
        """Let running calls end, drop queued ones."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def encode(self, sequence: Sequence) -> Features:
        """Features and positions of a request with images or videos. Raises DeepstackError."""
        return self._encode([sequence], ())[0]

    def run_next(self) -> None:
        """One call of the encoder for the request that has waited longest, and for those that fit beside it."""
        batch, coming = self._take()
        open_ = [item for item in batch if item.sequence.status is not Status.FINISHED]
        results: dict[Sequence, Features | DeepstackError] = {}
        try:
            results = self._results([item.sequence for item in open_], coming)
        finally:
            for item in batch:
                left = item not in open_  # its client left; images of others are waiting
                cancelled = CancelledError("the request was cancelled by its client")
                item.done(item.sequence, cancelled if left else results.get(item.sequence, _SURPRISE))

    def _take(self) -> tuple[list[_Waiting], list[Sequence]]:
        """The request that has waited longest, and those behind it that fit into a call with it; and those that the
        next call will probably hold.
        """
        with self._lock:
            batch: list[_Waiting] = []
            tokens = 0
            while self._waiting and (not batch or self._fits(batch[0].sequence, tokens, self._waiting[0].sequence)):
                batch.append(self._waiting.popleft())
                tokens += batch[-1].sequence.prompt_tokens
            return batch, self._next_call()

    def _next_call(self) -> list[Sequence]:
        """A call's worth of the requests that follow; none where images are encoded one request at a time."""
        sequences: list[Sequence] = []
        tokens = 0
        for sequence in (*(item.sequence for item in self._waiting), *self._coming):
            if sequence.status is Status.FINISHED:
                continue
            tokens += sequence.prompt_tokens
            if tokens > self.batch_tokens:
                break
            sequences.append(sequence)
        if not self._waiting:  # what follows comes with the next submit, which may never be
            self._coming = ()
        return sequences

    def _fits(self, first: Sequence, tokens: int, further: Sequence) -> bool:
        has_videos = first.files.videos or further.files.videos
        alike = first.request.audit.zeroed == further.request.audit.zeroed
        return tokens + further.prompt_tokens <= self.batch_tokens and alike and not has_videos

    def _results(self, sequences: list[Sequence], coming: list[Sequence]) -> dict[Sequence, Features | DeepstackError]:
        """A call that fails is made again for each request alone, so that one's bad image stays its own, and so that
        images that only follow end none.
        """
        try:
            return dict(zip(sequences, self._encode(sequences, coming) if sequences else (), strict=True))
        except DeepstackError as error:
            if len(sequences) == 1 and (not coming or isinstance(error, InvalidRequestError)):
                return {sequences[0]: error}
        alone: dict[Sequence, Features | DeepstackError] = {}
        for sequence in sequences:
            alone |= self._results([sequence], [])
        return alone

    def _encode(self, sequences: list[Sequence], coming: Iterable[Sequence]) -> list[Features]:
        outputs = self._port.call_encoder(_joined_files(sequences, coming), [*self._features, *self._sizes])
        sizes = {name: self._port.array(outputs[name]) for name in self._sizes}
        self._check_counts(sequences, sizes)
        zeroed = {deepstack_name(layer) for layer in sequences[0].request.audit.zeroed}
        tensors = {
            name: self._port.zeros(name, outputs[name]) if name in zeroed else outputs[name] for name in self._features
        }
        rows = [len(sequence.prompt.image_rows) for sequence in sequences]
        batch = EncodedBatch(tensors, sum(rows), all(map(self._port.is_on_host, tensors.values())))
        images = np.cumsum([0, *(len(sequence.prompt.image_tokens) for sequence in sequences)])
        return [
            Features(batch, sum(rows[:number]), self._positions(sequence, sizes, int(images[number])))
            for number, sequence in enumerate(sequences)
        ]

    def _check_counts(self, sequences: list[Sequence], sizes: dict[str, Array]) -> None:
        prompts = [sequence.prompt for sequence in sequences]
        expected = {
            IMAGE_TOKENS.name: [count for prompt in prompts for count in prompt.image_tokens],
            VIDEO_TOKENS.name: [count for prompt in prompts for count in prompt.video_tokens],
        }
        for name, counts in expected.items():
            if name in sizes and sizes[name].tolist() != counts:
                raise StageError(f"the encoder gave {name} {sizes[name].tolist()}, the prompt has {counts}")

    def _positions(self, sequence: Sequence, sizes: dict[str, Array], first_image: int) -> Positions:
        prompt = sequence.prompt
        grids = sizes[IMAGE_GRID.name][first_image : first_image + len(prompt.image_tokens)]
        family, config = self._checkpoint.family, self._checkpoint.config
        return family.positions(config, prompt.input_ids, grids, sizes.get(VIDEO_GRID.name))


def _joined_files(sequences: list[Sequence], coming: Iterable[Sequence]) -> MediaFiles:
    """Of requests without videos, or of one alone; a video has the encoder's threads for itself."""
    first = sequences[0].files
    named = () if first.videos else coming
    images, later = (tuple(image for item in items for image in item.files.images) for items in (sequences, named))
    return MediaFiles(images, first.videos, first.sampling, later)


def _report_surprise(future: Future[None]) -> None:
    """A pool keeps what nobody foresaw to itself; it belongs in the log."""
    error = None if future.cancelled() else future.exception()
    if error is not None:
        logging.getLogger(__name__).error("encoding failed", exc_info=error)
