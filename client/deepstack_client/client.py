"""The synchronous client: what a caller holds. It joins request factory, transport and stream, and adds nothing else.

It never retries: sending a failed request again is the caller's decision, and the error's type says if it helps.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from deepstack_client.errors import ClientError
from deepstack_client.images import ImageSource
from deepstack_client.readiness import PROBE_TIMEOUT_S, ReadinessWait
from deepstack_client.request import Message, RequestFactory, RequestOptions
from deepstack_client.response import Completion, ResponseReader
from deepstack_client.streams import Stream
from deepstack_client.transports import transport_for
from deepstack_client.transports.base import Transport

if TYPE_CHECKING:
    from typing_extensions import Unpack

DEFAULT_ADDRESS = "grpc://127.0.0.1:8001"
DEFAULT_TIMEOUT_S = 300.0


class Client:
    """Talks to one server. Thread-safe; any number of requests at once. Close it, or use it as a context manager."""

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        model: str = "orchestrator",
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
        transport: Transport | None = None,
    ) -> None:
        self._factory = RequestFactory(model, timeout_s)
        self._transport = transport_for(address) if transport is None else transport

    def generate(
        self, prompt: str | Sequence[Message], images: Iterable[ImageSource] = (), **options: Unpack[RequestOptions]
    ) -> Completion:
        """The whole answer to a prompt or a list of chat messages about the images. Options: see `RequestOptions`."""
        with self._start(prompt, images, False, options) as stream:
            return stream.completion()

    def stream(
        self, prompt: str | Sequence[Message], images: Iterable[ImageSource] = (), **options: Unpack[RequestOptions]
    ) -> Stream:
        """The answer in pieces, as they come. Use it as a context manager: leaving early cancels the request."""
        return self._start(prompt, images, True, options)

    def is_ready(self) -> bool:
        """Whether the server answers and has the model loaded."""
        try:
            return self._transport.is_ready(self._factory.model, PROBE_TIMEOUT_S)
        except ClientError:
            return False

    def wait_until_ready(self, timeout_s: float) -> None:
        """Returns once the server is ready; raises RequestTimeoutError with the last reason otherwise."""
        wait = ReadinessWait(self._factory.model, timeout_s)
        while not self._probe(wait):
            time.sleep(wait.pause_s())

    def close(self) -> None:
        self._transport.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _start(
        self, prompt: str | Sequence[Message], images: Iterable[ImageSource], stream: bool, options: RequestOptions
    ) -> Stream:
        request, timeout_s = self._factory.build(prompt, images, stream, options)
        return Stream(self._transport.start(request, timeout_s), ResponseReader(request.request_id))

    def _probe(self, wait: ReadinessWait) -> bool:
        try:
            return self._transport.is_ready(self._factory.model, wait.probe_timeout_s)
        except ClientError as error:
            wait.last_error = error
            return False
