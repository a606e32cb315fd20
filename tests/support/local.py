"""All stages in this process behind the engine's ports: the real stages and the real engine, without a server."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from deepstack_serving.checkpoint import open_checkpoint
from deepstack_serving.engine import orchestrator
from deepstack_serving.engine.encoder import Done, Encoder
from deepstack_serving.engine.ports import Array, Output
from deepstack_serving.engine.sequence import Features, Sequence
from deepstack_serving.errors import DeepstackError, from_wire
from deepstack_serving.injection import plan_stages
from deepstack_serving.media import MediaFiles
from deepstack_serving.settings import Settings, parse_settings
from deepstack_serving.stages.call import DTYPES
from deepstack_serving.stages.language import LanguageStage
from deepstack_serving.stages.vision import VisionStage
from deepstack_serving.wire import VISION_ENCODER, TensorSpec

Change = Callable[[str, str, torch.Tensor], torch.Tensor]


def keep(_model: str, _name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def zero_deepstack(model: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The control arm: what the encoder sends for the deepstack levels is zero."""
    return torch.zeros_like(tensor) if name.startswith("ds_") and model == VISION_ENCODER else tensor


class LocalPort:
    """Implements StagePort. `change` may alter the tensors that a stage sends."""

    def __init__(self, settings: Settings, names: SequenceOf[str], change: Change = keep) -> None:
        checkpoint = open_checkpoint(settings.checkpoint, settings.dtype, merge_adapter=settings.merge_adapter)
        plans = plan_stages(checkpoint.layer_count, len(names), settings.split_points, checkpoint.deepstack_layers)
        self.vision = VisionStage(settings, checkpoint)
        self.language = {
            name: LanguageStage(settings, checkpoint, plans, tuple(names), index) for index, name in enumerate(names)
        }
        self.change = change
        self.calls: list[tuple[str, tuple[str, ...]]] = []
        self.steps: list[tuple[str, int]] = []  # of each call, with its model
        self.most_at_once = self._at_once = 0
        self._counting = threading.Lock()
        self._busy = {name: threading.Lock() for name in (VISION_ENCODER, *names)}  # a model takes one call at a time
        self.refusals: list[DeepstackError] = []

    def call(self, model: str, inputs: Mapping[str, Any], outputs: SequenceOf[str]) -> dict[str, torch.Tensor]:
        self.calls.append((model, tuple(inputs)))
        self.steps.append((model, int(inputs["decode_steps"][0]) if "decode_steps" in inputs else 1))
        tensors = {
            name: value if isinstance(value, torch.Tensor) else torch.tensor(value) for name, value in inputs.items()
        }
        try:
            with self._called(), self._busy[model]:
                results = self.language[model].run(tensors, outputs)
        except DeepstackError as error:
            self.refusals.append(error)
            raise from_wire(error.to_wire()) from error
        return {name: self.change(model, name, tensor) for name, tensor in results.items()}

    @contextlib.contextmanager
    def _called(self) -> Iterator[None]:
        """Counts the calls that are there at one time."""
        with self._counting:
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            yield
        finally:
            with self._counting:
                self._at_once -= 1

    def call_encoder(self, files: MediaFiles, outputs: SequenceOf[str]) -> dict[str, torch.Tensor]:
        with self._busy[VISION_ENCODER]:
            results = self.vision.run(files, outputs)
        return {name: self.change(VISION_ENCODER, name, tensor) for name, tensor in results.items()}

    def array(self, handle: torch.Tensor) -> Array:
        return handle.cpu().numpy()

    def empty(self, spec: TensorSpec) -> torch.Tensor:
        return torch.zeros([max(size, 0) for size in spec.shape], dtype=DTYPES[spec.dtype])

    def zeros(self, _name: str, handle: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(handle)

    def is_on_host(self, handle: torch.Tensor) -> bool:
        return not handle.is_cuda

    def join(self, _name: str, handles: SequenceOf[torch.Tensor]) -> torch.Tensor:
        return handles[0] if len(handles) == 1 else torch.cat(list(handles))


class CollectingReply:
    """Implements ReplyPort; `wait` returns when the final response came."""

    def __init__(self) -> None:
        self.outputs: list[Output] = []
        self.error: DeepstackError | None = None
        self.cancelled = False
        self.finals = 0
        self._done = threading.Event()

    def send(self, output: Output, *, final: bool) -> None:
        self.outputs.append(output)
        if final:
            self._end()

    def fail(self, error: DeepstackError) -> None:
        if not self._done.is_set():
            self.error = error
            self._end()

    def is_cancelled(self) -> bool:
        return self.cancelled

    def wait(self, timeout_s: float = 60.0) -> CollectingReply:
        if not self._done.wait(timeout_s):
            raise TimeoutError("no final response")
        return self

    @property
    def text(self) -> str:
        if self.error is not None:
            raise self.error
        return "".join(output.text for output in self.outputs)

    @property
    def tokens(self) -> list[dict[str, Any]]:
        return [token for output in self.outputs for token in output.logprobs]

    def _end(self) -> None:
        self.finals += 1
        self._done.set()


STAGE_NAMES = {1: ("language",), 2: ("language_early", "language_late"), 4: tuple(f"language_{i}" for i in range(4))}


def local_settings(checkpoint: Path, **values: object) -> Settings:
    texts = {"checkpoint": str(checkpoint), "device": "cpu", "kv_pool_tokens": "4096", "cpu_threads": "1"}
    return parse_settings({**texts, **{name: str(value) for name, value in values.items()}})


class InlineEncoder(Encoder):
    """Encodes in the engine's thread, so that when a request joins the others does not depend on timing."""

    def submit(self, sequences: Iterable[Sequence], done: Done, _coming: Iterable[Sequence] = ()) -> None:
        for sequence in sequences:
            try:
                result: Features | DeepstackError = self.encode(sequence)
            except DeepstackError as error:
                result = error
            done(sequence, result)


class LocalServer:
    """The orchestrator over local stages; a context manager that checks that no block leaked.

    It also checks that no stage refused a call, unless `refusals` are expected: the engine tries the requests of a
    refused call alone, so that a badly packed batch would still be answered right.
    `held`: started by `start`, not on entry, and encoding inline: what is submitted before runs in the same batches
    every time.
    """

    def __init__(
        self,
        settings: Settings,
        stages: int = 2,
        change: Change = keep,
        *,
        held: bool = False,
        refusals: bool = False,
    ) -> None:
        self.port = LocalPort(settings, STAGE_NAMES[stages], change)
        self._held, self._started, self._refusals_expected = held, False, refusals
        with mock.patch.object(orchestrator, "Encoder", InlineEncoder if held else Encoder):
            self.orchestrator = orchestrator.Orchestrator(settings, self.port, STAGE_NAMES[stages])

    def __enter__(self) -> LocalServer:
        if not self._held:
            self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.orchestrator.close()
        self.port.vision.close()
        self.orchestrator.engine.scheduler.allocator.check(idle=True)
        if self.port.refusals and not self._refusals_expected:
            raise self.port.refusals[0]

    def start(self) -> None:
        """Start the engine; a second call does nothing."""
        if not self._started:
            self._started = True
            self.orchestrator.start()

    def submit(self, inputs: Mapping[str, list[Any]], **parameters: Any) -> CollectingReply:
        reply = CollectingReply()
        self.orchestrator.submit(inputs, parameters, reply)
        return reply
