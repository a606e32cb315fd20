"""HTTP transport of the synchronous client: the generate and generate_stream endpoints, one connection per request.

Triton notices that an HTTP client left only after it has sent a first response: a request cancelled earlier runs on
until then. gRPC has no such gap.
"""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections import deque

from deepstack_client.errors import ClientError, ConnectError, RequestCancelledError, RequestTimeoutError
from deepstack_client.request import WireRequest
from deepstack_client.response import WireResponse
from deepstack_client.transports import http_codec

_READ_BYTES = 65536


class HttpConnection:
    """One HTTP request and its body, with a time limit over the whole and a cancel that wakes a blocked read."""

    def __init__(self, host: str, port: int, timeout_s: float | None) -> None:
        self._connection = http.client.HTTPConnection(host, port)
        self._deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        self._response: http.client.HTTPResponse | None = None
        self._socket: socket.socket | None = None
        self._cancelled = False
        self._lock = threading.Lock()

    def send(self, method: str, path: str, body: bytes | None) -> int:
        """The HTTP status."""
        try:
            self._connect()
            headers = {"Content-Type": "application/json", "Connection": "close"}
            self._connection.request(method, path, body, headers)
            self._limit_next_wait()
            self._response = self._connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise self._translated(error) from error
        return self._response.status

    def read(self) -> bytes:
        """What has arrived of the body, b"" at its end."""
        if self._response is None:
            return b""
        try:
            self._limit_next_wait()
            data = self._response.read1(_READ_BYTES)
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise self._translated(error) from error
        if not data and self._cancelled:  # a shut-down socket reads like the end of the body
            raise RequestCancelledError("the request was cancelled")
        return data

    def read_all(self) -> bytes:
        return b"".join(iter(self.read, b""))

    def cancel(self) -> None:
        with self._lock:
            self._cancelled = True
            if self._socket is not None:
                _shut_down(self._socket)

    def close(self) -> None:
        if self._response is not None:
            self._response.close()
        self._connection.close()

    def _connect(self) -> None:
        self._connection.timeout = self._remaining_s()
        self._connection.connect()
        with self._lock:
            self._socket = self._connection.sock
            if self._cancelled:
                _shut_down(self._socket)

    def _remaining_s(self) -> float | None:
        if self._deadline_s is None:
            return None
        remaining_s = self._deadline_s - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError
        return remaining_s

    def _limit_next_wait(self) -> None:
        if self._socket is not None:
            self._socket.settimeout(self._remaining_s())

    def _translated(self, error: Exception) -> ClientError:
        if self._cancelled:
            return RequestCancelledError("the request was cancelled")
        if isinstance(error, TimeoutError):
            return RequestTimeoutError("the time limit of the request passed")
        return ConnectError(f"no connection to the server: {error or type(error).__name__}")


class HttpExchange:
    """Connects and sends at the first `receive`."""

    def __init__(self, connection: HttpConnection, request: WireRequest) -> None:
        self._connection = connection
        self._request = request
        self._parser = http_codec.EventParser()
        self._payloads: deque[bytes] = deque()
        self._sent = self._ended = False
        self._busy = threading.Lock()  # held by a running `receive`, which then is the one to close the connection

    def receive(self) -> WireResponse | None:
        with self._busy:
            response = None
            try:
                response = self._next()
            finally:
                if response is None:
                    self._connection.close()
        return response

    def cancel(self) -> None:
        self._connection.cancel()
        if self._busy.acquire(blocking=False):
            self._connection.close()
            self._busy.release()

    def _next(self) -> WireResponse | None:
        if not self._sent:
            self._send()
        while not self._payloads and not self._ended:
            data = self._connection.read()
            self._ended = not data
            self._payloads.extend(self._parser.feed(data))
        return http_codec.decode_response(self._payloads.popleft()) if self._payloads else None

    def _send(self) -> None:
        self._sent = True
        path, body = http_codec.encode_request(self._request)
        status = self._connection.send("POST", path, body)
        if status == 200 and self._request.stream:
            return
        self._ended = True
        content = self._connection.read_all()
        if status != 200:
            raise http_codec.error_from_status(status, content)
        self._payloads.append(content)


class HttpTransport:
    """Any number of requests at once, from any thread."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port

    def start(self, request: WireRequest, timeout_s: float | None) -> HttpExchange:
        return HttpExchange(HttpConnection(self._host, self._port, timeout_s), request)

    def is_ready(self, model: str, timeout_s: float | None) -> bool:
        return all(self._answers(path, timeout_s) for path in ("/v2/health/ready", f"/v2/models/{model}/ready"))

    def close(self) -> None:
        """Nothing is kept between requests."""

    def _answers(self, path: str, timeout_s: float | None) -> bool:
        connection = HttpConnection(self._host, self._port, timeout_s)
        try:
            return connection.send("GET", path, None) == 200
        finally:
            connection.close()


def _shut_down(connected: socket.socket) -> None:
    try:
        connected.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # already closed by the server
