"""The HTTP transport against a small real HTTP server that speaks Triton's generate dialect."""

import asyncio
import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from deepstack_client import (
    AsyncClient,
    Client,
    ConnectError,
    InvalidRequestError,
    ProtocolError,
    RequestCancelledError,
    RequestTimeoutError,
    ServerError,
    ServerUnavailableError,
)
from deepstack_client.transports.http_codec import EventParser

FINAL = {"text_output": "2 é", "finish_reason": "stop", "num_output_tokens": 1, "model_name": "orchestrator"}
FIRST = {**FINAL, "text_output": "4", "finish_reason": "None"}


class Handler(BaseHTTPRequestHandler):
    """Plays `server.script`: dicts become events or the body, None waits until the client has left."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, body))
        if self.path.endswith("_stream") and self.server.status == 200:
            self._stream()
        else:
            self._answer(self.server.body_prefix + json.dumps(self.server.script[0]).encode())

    def do_GET(self) -> None:
        self.server.status = 400 if "absent" in self.path else 200
        self._answer(b"")

    def log_message(self, *_) -> None:
        """Silent."""

    def _answer(self, body: bytes) -> None:
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for step in self.server.script:
            if step is None:
                self._wait_until_the_client_has_left()
                return
            event = f"data: {json.dumps(step)}\n\n".encode()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))
        self.wfile.write(self.server.end)
        self.close_connection = True

    def _wait_until_the_client_has_left(self) -> None:
        self.server.waiting.set()
        self.connection.recv(1)
        self.server.left.set()
        self.close_connection = True


class Server(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script = [FIRST, FINAL]
        self.status = 200
        self.body_prefix = b""
        self.end = b"0\r\n\r\n"
        self.requests = []
        self.waiting = threading.Event()
        self.left = threading.Event()
        self.address = f"http://127.0.0.1:{self.server_port}"


@pytest.fixture
def server():
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_generate_uses_the_generate_endpoint(server):
    server.script = [FINAL]
    assert Client(server.address).generate("?").text == "2 é"
    assert server.requests[0][0] == "/v2/models/orchestrator/generate"


def test_a_stream_uses_generate_stream_and_comes_in_pieces(server):
    with Client(server.address).stream("?") as stream:
        assert [chunk.text for chunk in stream] == ["4", "2 é"]
    assert server.requests[0][0] == "/v2/models/orchestrator/generate_stream"


def test_the_body_holds_the_inputs_with_images_as_base64(server):
    server.script = [FINAL]
    Client(server.address).generate("é", [b"\xff\0"], max_tokens=3, request_id="mine")
    body = server.requests[0][1]
    assert (body["id"], body["text_input"], body["stream"]) == ("mine", "é", False)
    assert [base64.b64decode(image) for image in body["image"]] == [b"\xff\0"]
    assert json.loads(body["sampling_parameters"]) == {"max_tokens": 3}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "status, text, error",
    [
        (400, "[UNAVAILABLE] draining", ServerUnavailableError),
        (400, "unexpected input", InvalidRequestError),
        (503, "not ready", ServerUnavailableError),
        (500, "broken", ServerError),
        (200, "[INVALID_ARG] too late", InvalidRequestError),
        (200, "broken", ServerError),
    ],
)
def test_an_error_body_gives_a_typed_error(stream, status, text, error, server):
    server.status, server.script = status, [{"error": text}]
    with pytest.raises(error) as raised, Client(server.address).stream("?") as streaming:
        streaming.completion() if stream else Client(server.address).generate("?")
    assert str(raised.value) == (text.partition("] ")[2] or text)


def test_a_first_error_of_a_stream_may_be_an_event_under_an_error_status(server):
    server.status, server.body_prefix, server.script = 400, b"data: ", [{"error": "[UNAVAILABLE] draining"}]
    with pytest.raises(ServerUnavailableError, match=r"^draining$"), Client(server.address).stream("?") as stream:
        stream.completion()


def test_an_error_after_the_first_event_gives_a_typed_error(server):
    server.script = [FIRST, {"error": "[CANCELLED] Request was cancelled"}]
    with Client(server.address).stream("?") as stream:
        assert next(stream).text == "4"
        with pytest.raises(RequestCancelledError, match=r"^Request was cancelled$"):
            next(stream)


def test_a_body_that_is_no_json_object_is_a_protocol_error(server):
    server.script = ["text"]
    with pytest.raises(ProtocolError, match="no JSON object"):
        Client(server.address).generate("?")


def test_an_end_without_a_final_event_is_a_protocol_error(server):
    server.script = [FIRST]
    with pytest.raises(ProtocolError, match="without a final response"), Client(server.address).stream("?") as stream:
        stream.completion()


def test_a_connection_that_breaks_is_a_connect_error(server):
    server.script, server.end = [FIRST], b""
    with pytest.raises(ConnectError), Client(server.address).stream("?") as stream:
        stream.completion()


def test_a_server_that_is_not_there_is_a_connect_error():
    with pytest.raises(ConnectError, match="no connection"):
        Client("http://127.0.0.1:1").generate("?")


def test_the_time_limit_ends_the_request(server):
    server.script = [FIRST, None]
    with pytest.raises(RequestTimeoutError), Client(server.address).stream("?", timeout_s=0.2) as stream:
        stream.completion()
    assert server.left.wait(10)


def test_leaving_a_stream_early_closes_the_connection(server):
    server.script = [FIRST, None]
    with Client(server.address).stream("?") as stream:
        next(stream)
    assert server.left.wait(10)


def test_closing_from_another_thread_ends_a_blocked_read(server):
    server.script = [None]
    with Client(server.address).stream("?") as stream:
        closer = threading.Thread(target=lambda: server.waiting.wait(10) and stream.close())
        closer.start()
        with pytest.raises(RequestCancelledError):
            next(stream)
        closer.join()


def test_the_asynchronous_client_streams_too(server):
    async def run() -> list[str]:
        async with AsyncClient(server.address) as client, client.stream("?") as stream:
            return [chunk.text async for chunk in stream]

    assert asyncio.run(run()) == ["4", "2 é"]


def test_cancelling_the_task_closes_the_connection(server):
    server.script = [None]

    async def run() -> None:
        client = AsyncClient(server.address)
        task = asyncio.create_task(client.stream("?").completion())
        await asyncio.to_thread(server.waiting.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert server.left.wait(10)


@pytest.mark.parametrize("model, ready", [("orchestrator", True), ("absent", False)])
def test_readiness_needs_the_model(model, ready, server):
    assert Client(server.address, model=model).is_ready() is ready


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_events_are_found_however_the_bytes_arrive(size):
    parser, stream = EventParser(), b": note\r\ndata: {1}\r\n\r\ndata:{2\ndata: 3}\n\nid: 9\n\ndata: {4}"
    parts = [stream[start : start + size] for start in range(0, len(stream), size)]
    assert [payload for part in [*parts, b""] for payload in parser.feed(part)] == [b"{1}", b"{2\n3}", b"{4}"]
