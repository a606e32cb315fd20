"""Encode a request's images and videos beside the engine thread, and compute the rotary positions that they give."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from deepstack_serving.checkpoint import Checkpoint
from deepstack_serving.engine.ports import StagePort
from deepstack_serving.engine.sequence import Features, Sequence, Status
from deepstack_serving.errors import CancelledError, DeepstackError, StageError
from deepstack_serving.wire import IMAGE_GRID, IMAGE_TOKENS, VIDEO_GRID, VIDEO_TOKENS, deepstack_name

Done = Callable[[Sequence, Features | DeepstackError], None]


class Encoder:
    """A few threads that call the vision encoder; every submitted request ends in exactly one call of `done`."""

    def __init__(self, port: StagePort, checkpoint: Checkpoint, threads: int) -> None:
        self._port, self._checkpoint = port, checkpoint
        contract = checkpoint.contract
        names = [deepstack_name(layer) for layer in contract.deepstack_layers]
        self._features = [*(["image_embeds"] if contract.has_image_embeds else []), *names]
        videos = (VIDEO_GRID, VIDEO_TOKENS) if contract.has_video else ()
        self._sizes = [spec.name for spec in (IMAGE_GRID, IMAGE_TOKENS, *videos)]
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="encode")

    def submit(self, sequence: Sequence, done: Done) -> None:
        """Encode in the background."""
        self._pool.submit(self._run, sequence, done).add_done_callback(_report_surprise)

    def close(self) -> None:
        """Let running calls end, drop queued ones."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _run(self, sequence: Sequence, done: Done) -> None:
        result: Features | DeepstackError = StageError(
            "the images or videos could not be encoded; the server's log says why"
        )
        try:
            if sequence.status is Status.FINISHED:  # its client left; images of others are waiting
                result = CancelledError("the request was cancelled by its client")
            else:
                result = self.encode(sequence)
        except DeepstackError as error:
            result = error
        finally:
            done(sequence, result)

    def encode(self, sequence: Sequence) -> Features:
        """Features and positions of a request with images or videos. Raises DeepstackError."""
        prompt = sequence.prompt
        outputs = self._port.call_encoder(sequence.files, [*self._features, *self._sizes])
        sizes = {name: self._port.array(outputs[name]) for name in self._sizes}
        expected = {IMAGE_TOKENS.name: prompt.image_tokens, VIDEO_TOKENS.name: prompt.video_tokens}
        for name, counts in expected.items():
            if name in sizes and tuple(sizes[name].tolist()) != counts:
                raise StageError(f"the encoder gave {name} {sizes[name].tolist()}, the prompt has {list(counts)}")
        positions = self._checkpoint.family.positions(
            self._checkpoint.config, prompt.input_ids, sizes[IMAGE_GRID.name], sizes.get(VIDEO_GRID.name)
        )
        zeroed = {deepstack_name(layer) for layer in sequence.request.audit.zeroed}
        tensors = {
            name: self._port.zeros(name, outputs[name]) if name in zeroed else outputs[name] for name in self._features
        }
        joinable = all(map(self._port.is_on_host, tensors.values()))
        return Features(tensors, len(prompt.image_rows), positions, joinable)


def _report_surprise(future: Future[None]) -> None:
    """A pool keeps what nobody foresaw to itself; it belongs in the log."""
    error = None if future.cancelled() else future.exception()
    if error is not None:
        logging.getLogger(__name__).error("encoding failed", exc_info=error)
