"""What the engine needs from outside, as protocols: the stages behind it and the reply to each client.

The bridge implements them with Triton; tests and the offline runner implement them in one process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from deepstack_serving.engine.request import OutputOptions
from deepstack_serving.errors import DeepstackError
from deepstack_serving.media import MediaFiles
from deepstack_serving.wire import TensorSpec

Array = npt.NDArray[Any]
Handle = Any  # a tensor that the engine forwards without looking inside; only the port knows what it is


class StagePort(Protocol):
    """Calls to the stages. Every method raises a DeepstackError and nothing else."""

    def call(self, model: str, inputs: Mapping[str, Array | Handle], outputs: Sequence[str]) -> Mapping[str, Handle]:
        """Run a stage. Outputs that this call cannot have (features of a text step) are missing from the result."""

    def call_encoder(self, files: MediaFiles, outputs: Sequence[str]) -> Mapping[str, Handle]:
        """Run the vision encoder on image and video files."""

    def array(self, handle: Handle) -> Array:
        """The content of a small tensor."""

    def empty(self, spec: TensorSpec) -> Handle:
        """A tensor of this name and type without elements: free dimensions are 0."""

    def zeros(self, name: str, handle: Handle) -> Handle:
        """A tensor of the same type and shape, of zeros."""

    def is_on_host(self, handle: Handle) -> bool:
        """Whether a tensor is in host memory, where it can be joined with others; one on a GPU goes on as it is."""

    def join(self, name: str, handles: Sequence[Handle]) -> Handle:
        """One tensor with the rows of several on the host, in order; a single one is passed on as it is."""


@dataclass(frozen=True)
class Output:
    """One response: new text with what belongs to it. `finish_reason` is None until the end."""

    text: str
    finish_reason: str | None
    input_tokens: int
    output_tokens: int
    cumulative_logprob: float
    logprobs: tuple[dict[str, Any], ...] = ()
    options: OutputOptions = field(default_factory=OutputOptions)


class ReplyPort(Protocol):
    """The reply to one request: any number of sends, then exactly one final send or failure; later calls do nothing."""

    def send(self, output: Output, *, final: bool) -> None: ...

    def fail(self, error: DeepstackError) -> None: ...

    def is_cancelled(self) -> bool: ...


def empty_rows() -> npt.NDArray[np.int64]:
    """No rows."""
    return np.zeros(0, dtype=np.int64)
