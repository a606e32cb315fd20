"""Encode a request's images beside the engine thread, and compute the rotary positions that they give."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from deepstack_serving.checkpoint import Checkpoint
from deepstack_serving.engine.ports import StagePort
from deepstack_serving.engine.sequence import Features, Sequence
from deepstack_serving.errors import DeepstackError, StageError
from deepstack_serving.wire import IMAGE_GRID, IMAGE_TOKENS, deepstack_name

Done = Callable[[Sequence, Features | DeepstackError], None]


class Encoder:
    """A few threads that call the vision encoder; every submitted request ends in exactly one call of `done`."""

    def __init__(self, port: StagePort, checkpoint: Checkpoint, threads: int) -> None:
        self._port, self._checkpoint = port, checkpoint
        contract = checkpoint.contract
        names = [deepstack_name(layer) for layer in contract.deepstack_layers]
        self._features = [*(["image_embeds"] if contract.has_image_embeds else []), *names]
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="encode")

    def submit(self, sequence: Sequence, done: Done) -> None:
        """Encode in the background."""
        self._pool.submit(self._run, sequence, done).add_done_callback(_report_surprise)

    def close(self) -> None:
        """Let running calls end, drop queued ones."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _run(self, sequence: Sequence, done: Done) -> None:
        result: Features | DeepstackError = StageError("the images could not be encoded; the server's log says why")
        try:
            result = self.encode(sequence)
        except DeepstackError as error:
            result = error
        finally:
            done(sequence, result)

    def encode(self, sequence: Sequence) -> Features:
        """Features and positions of a request with images. Raises DeepstackError."""
        prompt = sequence.prompt
        outputs = self._port.call_encoder(sequence.files, [*self._features, IMAGE_GRID.name, IMAGE_TOKENS.name])
        counts = self._port.array(outputs[IMAGE_TOKENS.name]).tolist()
        if counts != list(prompt.image_tokens):
            raise StageError(
                f"the encoder gave {counts} tokens for images that take {list(prompt.image_tokens)} in the prompt"
            )
        grid = self._port.array(outputs[IMAGE_GRID.name])
        positions = self._checkpoint.family.positions(self._checkpoint.config, prompt.input_ids, grid)
        return Features({name: outputs[name] for name in self._features}, sum(counts), positions)


def _report_surprise(future: Future[None]) -> None:
    """A pool keeps what nobody foresaw to itself; it belongs in the log."""
    error = None if future.cancelled() else future.exception()
    if error is not None:
        logging.getLogger(__name__).error("encoding failed", exc_info=error)
