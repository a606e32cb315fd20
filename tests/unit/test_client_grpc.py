"""Both gRPC transports against a small real gRPC server that speaks Triton's stream protocol."""

import asyncio
import struct
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

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

UNREACHABLE = "grpc://127.0.0.1:1"


def response(text: str, finish_reason: str = "None", num_output_tokens: int = 1):
    message = service_pb2.ModelStreamInferResponse()
    contents = {
        "text_output": ("BYTES", struct.pack("<I", len(text.encode())) + text.encode()),
        "finish_reason": ("BYTES", struct.pack("<I", len(finish_reason)) + finish_reason.encode()),
        "num_output_tokens": ("UINT32", struct.pack("<I", num_output_tokens)),
        "cumulative_logprob": ("FP32", struct.pack("<f", -0.5)),
    }
    for name, (datatype, content) in contents.items():
        message.infer_response.outputs.add(name=name, datatype=datatype, shape=[1])
        message.infer_response.raw_output_contents.append(content)
    return message


class Server(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Plays `script`: responses, a (status, text) to fail with, or None to wait until the client has left."""

    def __init__(self) -> None:
        self.script = [response("4"), response("2 é", "stop", 2)]
        self.requests = []
        self.metadata = {}
        self.waiting = threading.Event()
        self.left = threading.Event()

    def ModelStreamInfer(self, requests, context):  # noqa: N802
        self.metadata = dict(context.invocation_metadata())
        self.requests.append(next(requests))
        context.add_callback(self.left.set)
        for step in self.script:
            if isinstance(step, tuple):
                context.abort(*step)
            elif step is None:
                self.waiting.set()
                self.left.wait()
            else:
                yield step

    def ServerReady(self, request, context):  # noqa: N802
        return service_pb2.ServerReadyResponse(ready=True)

    def ModelReady(self, request, context):  # noqa: N802
        return service_pb2.ModelReadyResponse(ready=request.name == "orchestrator")


@pytest.fixture
def served():
    """The server and its address."""
    servicer = Server()
    server = grpc.server(ThreadPoolExecutor(4))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"grpc://127.0.0.1:{port}"
    server.stop(0).wait()


def generate(kind: str, address: str, *arguments, **options):
    """The same request by either client."""

    async def run():
        async with AsyncClient(address) as client:
            return await client.generate(*arguments, **options)

    if kind == "async":
        return asyncio.run(run())
    with Client(address) as client:
        return client.generate(*arguments, **options)


both = pytest.mark.parametrize("kind", ["sync", "async"])


@both
def test_an_answer_comes_back(kind, served):
    completion = generate(kind, served[1], "?")
    assert (completion.text, completion.finish_reason, completion.num_output_tokens) == ("42 é", "stop", 3)
    assert completion.cumulative_logprob == -0.5


def test_a_stream_comes_back_in_pieces(served):
    with Client(served[1]) as client, client.stream("?") as stream:
        assert [chunk.text for chunk in stream] == ["4", "2 é"]


@both
def test_inputs_arrive_as_the_model_declares_them(kind, served):
    generate(kind, served[1], "é", [b"one", b"three"], request_id="mine")
    request = served[0].requests[0]
    contents = dict(zip([tensor.name for tensor in request.inputs], request.raw_input_contents, strict=True))
    shapes = {tensor.name: (tensor.datatype, list(tensor.shape)) for tensor in request.inputs}
    assert (request.model_name, request.id) == ("orchestrator", "mine")
    assert contents["text_input"] == b"\x02\0\0\0\xc3\xa9"
    assert contents["image"] == b"\x03\0\0\0one\x05\0\0\0three"
    assert contents["stream"] == b"\0"
    assert (shapes["image"], shapes["stream"]) == (("BYTES", [2]), ("BOOL", [1]))


@both
def test_the_header_that_asks_for_statuses_is_sent(kind, served):
    generate(kind, served[1], "?")
    assert served[0].metadata["triton_grpc_error"] == "true"


@both
@pytest.mark.parametrize(
    "status, text, error",
    [
        ("INVALID_ARGUMENT", "[INVALID_ARG] too many images", InvalidRequestError),
        ("INTERNAL", "[UNAVAILABLE] draining", ServerUnavailableError),
        ("INVALID_ARGUMENT", "unexpected input", InvalidRequestError),
        ("UNAVAILABLE", "queue is full", ServerUnavailableError),
        ("INTERNAL", "broken", ServerError),
        ("UNKNOWN", "", ServerError),
    ],
)
def test_a_failed_stream_gives_a_typed_error(kind, status, text, error, served):
    served[0].script = [response("4"), (grpc.StatusCode[status], text)]
    with pytest.raises(error) as raised:
        generate(kind, served[1], "?")
    assert str(raised.value) == (text.partition("] ")[2] or text or "the server gave no reason")


@both
@pytest.mark.parametrize(
    "text, error", [("[INTERNAL] broken", ServerError), ("unexpected inference input 'x'", InvalidRequestError)]
)
def test_an_error_message_without_a_status_gives_a_typed_error(kind, text, error, served):
    served[0].script = [service_pb2.ModelStreamInferResponse(error_message=text)]
    with pytest.raises(error) as raised:
        generate(kind, served[1], "?")
    assert str(raised.value) == text.removeprefix("[INTERNAL] ")


@both
def test_an_end_without_a_final_response_is_a_protocol_error(kind, served):
    served[0].script = [response("4")]
    with pytest.raises(ProtocolError, match="without a final response"):
        generate(kind, served[1], "?")


@both
def test_an_output_that_cannot_be_read_is_a_protocol_error(kind, served):
    served[0].script = [response("4")]
    served[0].script[0].infer_response.raw_output_contents[0] = b"\x01\0\0\0\xff"
    with pytest.raises(ProtocolError, match="text_output"):
        generate(kind, served[1], "?")


@both
def test_a_server_that_is_not_there_is_a_connect_error(kind):
    with pytest.raises(ConnectError, match="no connection"):
        generate(kind, UNREACHABLE, "?")


@both
def test_the_time_limit_ends_the_request_on_both_sides(kind, served):
    served[0].script = [None]
    with pytest.raises(RequestTimeoutError):
        generate(kind, served[1], "?", timeout_s=0.2)
    assert served[0].left.wait(10)


def test_leaving_a_stream_early_cancels_it_on_the_server(served):
    served[0].script = [response("4"), None]
    with Client(served[1]) as client:
        with client.stream("?") as stream:
            next(stream)
        assert served[0].left.wait(10)


def test_closing_from_another_thread_ends_a_blocked_read(served):
    served[0].script = [None]
    with Client(served[1]) as client, client.stream("?") as stream:
        closer = threading.Thread(target=lambda: served[0].waiting.wait(10) and stream.close())
        closer.start()
        with pytest.raises(RequestCancelledError):
            next(stream)
        closer.join()


def test_closing_an_asynchronous_stream_ends_a_read_under_way(served):
    served[0].script = [None]

    async def run() -> None:
        async with AsyncClient(served[1]) as client:
            stream = client.stream("?")
            reading = asyncio.create_task(stream.completion())
            await asyncio.to_thread(served[0].waiting.wait, 10)
            stream.close()
            await reading

    with pytest.raises(RequestCancelledError):
        asyncio.run(run())


def test_cancelling_the_task_cancels_the_request_on_the_server(served):
    served[0].script = [None]

    async def run() -> bool:
        async with AsyncClient(served[1]) as client:
            task = asyncio.create_task(client.generate("?"))
            await asyncio.to_thread(served[0].waiting.wait, 10)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return await asyncio.to_thread(served[0].left.wait, 10)

    assert asyncio.run(run())


def test_one_client_has_several_streams_open_at_once(served):
    with Client(served[1]) as client, client.stream("?") as one, client.stream("?") as two:
        assert [(first.text, second.text) for first, second in zip(one, two, strict=True)] == [
            ("4", "4"),
            ("2 é", "2 é"),
        ]


@pytest.mark.parametrize("model, ready", [("orchestrator", True), ("absent", False)])
def test_readiness_needs_the_model(model, ready, served):
    async def run() -> bool:
        async with AsyncClient(served[1], model=model) as client:
            return await client.is_ready()

    with Client(served[1], model=model) as client:
        assert client.is_ready() is ready
    assert asyncio.run(run()) is ready


def test_an_unreachable_server_is_not_ready():
    with Client(UNREACHABLE) as client:
        assert not client.is_ready()
