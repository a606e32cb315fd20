"""Ask a running server by raw gRPC and raw HTTP.

Nothing here uses the project's client: what is measured is what any client would see.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
from tritonclient.grpc import InferenceServerClient, InferInput, InferRequestedOutput, service_pb2, service_pb2_grpc

from deepstack_serving.embedded import EmbeddedServer

PATIENCE_S = 20.0  # how long anything may take that is to happen; far beyond what it takes

Inputs = Mapping[str, Any]


def request(text: str | None = None, images: Sequence[bytes | str] = (), **options: Any) -> dict[str, Any]:
    """Inputs of a greedy request without an early end. Options named as inputs are inputs, the others sampling."""
    names = ("messages", "stream", "raw_prompt", "exclude_input_in_output")
    inputs = {name: value for name, value in options.items() if name in names or name.startswith(("return_", "video"))}
    sampling = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    sampling |= {name: value for name, value in options.items() if name not in inputs}
    inputs["sampling_parameters"] = json.dumps(sampling)
    return {**inputs, **({} if text is None else {"text_input": text}), **({"image": list(images)} if images else {})}


@dataclass
class Reply:
    """What came back on one gRPC stream: outputs of the responses that have some, errors, and final marks."""

    outputs: list[dict[str, Any]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    finals: int = 0

    @property
    def text(self) -> str:
        assert not self.errors, self.errors
        return "".join(output["text_output"] for output in self.outputs)

    @property
    def error(self) -> str:
        """The only error, of a request that gave nothing else."""
        assert (self.outputs, len(self.errors)) == ([], 1), self
        return self.errors[0]

    @property
    def tokens(self) -> list[dict[str, Any]]:
        assert not self.errors, self.errors
        return [token for output in self.outputs for token in json.loads(output["logprobs"])]

    @property
    def token_ids(self) -> list[int]:
        return [token["token_id"] for token in self.tokens]

    @property
    def logprobs(self) -> npt.NDArray[np.float64]:
        return np.array([token["logprob"] for token in self.tokens])

    def add(self, message: Any) -> None:
        if message.error_message:
            self.errors.append(message.error_message)
        self.finals += message.infer_response.parameters["triton_final_response"].bool_param
        contents = message.infer_response.raw_output_contents
        if contents:
            pairs = zip(message.infer_response.outputs, contents, strict=True)
            self.outputs.append({item.name: _decode(item.datatype, content) for item, content in pairs})


class Stream:
    """One request on a gRPC stream of its own; leaving the context cancels it."""

    def __init__(
        self, address: str, inputs: Inputs | Any, parameters: Inputs | None = None, timeout_s: float = PATIENCE_S
    ) -> None:
        self.reply = Reply()
        self._channel = grpc.insecure_channel(address, options=(("grpc.use_local_subchannel_pool", 1),))
        stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        marks = {"triton_enable_empty_final_response": True, **(parameters or {})}
        message = infer_message("orchestrator", inputs, marks) if isinstance(inputs, Mapping) else inputs
        self._call = stub.ModelStreamInfer(iter([message]), timeout=timeout_s)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self._call.cancel()
        self._channel.close()

    def receive(self, count: int) -> Stream:
        """The next responses."""
        for _ in range(count):
            self.reply.add(next(self._call))
        return self

    def rest(self) -> Reply:
        """All that is still to come."""
        for message in self._call:
            self.reply.add(message)
        return self.reply


def ask(server: EmbeddedServer, inputs: Inputs, parameters: Inputs | None = None) -> Reply:
    """One request by gRPC, read to its end."""
    with Stream(server.grpc_address, inputs, parameters) as stream:
        return stream.rest()


def refusal(server: EmbeddedServer, inputs: Inputs, parameters: Inputs | None = None) -> str:
    """The error of a request that is to be refused before anything is answered, with exactly one final response."""
    reply = ask(server, inputs, parameters)
    assert reply.finals == 1
    return reply.error


def post(server: EmbeddedServer, path: str, content: Inputs) -> tuple[int, str]:
    """Status and body of a POST to a model."""
    with http_response(server, path, content) as response:
        return response.status, response.read().decode()


@contextlib.contextmanager
def http_response(server: EmbeddedServer, path: str, content: Inputs) -> Iterator[http.client.HTTPResponse]:
    """The response as it comes; leaving the context closes the connection, whatever is still to come."""
    connection = connect(server.http_address)
    with contextlib.closing(connection):
        connection.request("POST", f"/v2/models/{path}", json.dumps(content), {"Content-Type": "application/json"})
        yield connection.getresponse()


def abandon(server: EmbeddedServer, path: str, content: Inputs) -> None:
    """A POST whose client leaves without waiting for anything."""
    connection = connect(server.http_address)
    with contextlib.closing(connection):
        connection.request("POST", f"/v2/models/{path}", json.dumps(content))


def generate(server: EmbeddedServer, content: Inputs) -> dict[str, Any]:
    """The answer of the HTTP generate endpoint."""
    status, body = post(server, "orchestrator/generate", content)
    assert status == 200, body
    return dict(json.loads(body))


def events(server: EmbeddedServer, content: Inputs) -> list[dict[str, Any]]:
    """The events of the HTTP generate_stream endpoint."""
    status, body = post(server, "orchestrator/generate_stream", content)
    assert status == 200, body
    return [json.loads(event.removeprefix("data: ")) for event in body.split("\n\n") if event.strip()]


def infer(
    server: EmbeddedServer, model: str, tensors: Mapping[str, npt.NDArray[Any]], outputs: Sequence[str]
) -> dict[str, npt.NDArray[Any]]:
    """One plain call of a stage; raises tritonclient's InferenceServerException."""
    with InferenceServerClient(server.grpc_address) as client:
        wanted = [InferRequestedOutput(name) for name in outputs]
        result = client.infer(model, [_infer_input(name, value) for name, value in tensors.items()], outputs=wanted)
        return {name: result.as_numpy(name) for name in outputs}


def infer_message(model: str, inputs: Inputs, parameters: Inputs) -> Any:
    """Triton's message for one request: text and lists of bytes as BYTES, bool as BOOL, int as INT32, float as FP32."""
    message = service_pb2.ModelInferRequest(model_name=model)
    for name, value in parameters.items():
        kind = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}[type(value)]
        setattr(message.parameters[name], kind, value)
    for name, value in inputs.items():
        datatype, layout = _SCALARS.get(type(value), ("BYTES", ""))
        elements = [value] if isinstance(value, bool | int | float | str | bytes) else value
        message.inputs.add(name=name, datatype=datatype, shape=[len(elements)])
        message.raw_input_contents.append(struct.pack(layout, value) if layout else b"".join(map(_element, elements)))
    return message


_SCALARS = {bool: ("BOOL", "<?"), int: ("INT32", "<i"), float: ("FP32", "<f")}


def _element(value: str | bytes) -> bytes:
    content = value.encode() if isinstance(value, str) else value
    return struct.pack("<I", len(content)) + content


def _decode(datatype: str, content: bytes) -> Any:
    if datatype == "BYTES":
        return content[4:].decode()
    return struct.unpack({"FP32": "<f", "UINT32": "<I"}[datatype], content)[0]


def _infer_input(name: str, value: npt.NDArray[Any]) -> InferInput:
    kinds = {"f4": "FP32", "f8": "FP64", "i8": "INT64", "i4": "INT32"}
    tensor = InferInput(name, list(value.shape), kinds.get(value.dtype.str[1:], "BYTES"))
    tensor.set_data_from_numpy(value)
    return tensor


def connect(address: str) -> http.client.HTTPConnection:
    """A plain HTTP connection."""
    host, _, port = address.rpartition(":")
    return http.client.HTTPConnection(host, int(port), timeout=PATIENCE_S)
