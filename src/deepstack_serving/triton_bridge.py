"""The border to Triton, and the only module that knows its Python API: tensors, errors, replies, calls to other models.

Broad excepts stand here and nowhere else: whatever fails, a Triton callback must answer, and no thread may die of it.
"""

from __future__ import annotations

import json
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import triton_python_backend_utils as pb_utils
from torch.utils.dlpack import from_dlpack

from deepstack_serving.engine.ports import Array, Handle, Output
from deepstack_serving.errors import DeepstackError, ErrorCode, StageError, from_wire
from deepstack_serving.gpu_memory import trim_stacks
from deepstack_serving.media import MediaFiles
from deepstack_serving.stages.call import DTYPES
from deepstack_serving.stages.device import DeviceGuard
from deepstack_serving.stages.handover import count_arrivals, ready_to_send
from deepstack_serving.stages.info import StageInfo
from deepstack_serving.stages.media_call import media_tensors
from deepstack_serving.wire import FILE_NAMES, VISION_ENCODER, ModelInterface, TensorSpec

# Triton's own parameters, with those of its names that start with `triton_`. The HTTP endpoints `generate` and
# `generate_stream` hand them on as if the client had made them up.
RESERVED = frozenset(
    {
        "id",
        "sequence_id",
        "sequence_start",
        "sequence_end",
        "priority",
        "timeout",
        "headers",
        "binary_data_output",
    }
)
FINAL = 1  # TRITONSERVER_RESPONSE_COMPLETE_FINAL
Run = Callable[[dict[str, Any], Sequence[str]], Mapping[str, torch.Tensor]]


def declare(config: Any, interface: ModelInterface) -> Any:
    """Complete a model's configuration with the tensors of its interface."""
    config.set_max_batch_size(0)
    for spec in interface.inputs:
        config.add_input({**_declaration(spec), "optional": spec.optional})
    for spec in interface.outputs:
        config.add_output(_declaration(spec))
    return config


def name_of(model_config: str) -> str:
    """A model's name, from the JSON that Triton passes."""
    return str(json.loads(model_config)["name"])


def parameters_of(model_config: str) -> dict[str, str]:
    """The `parameters` of a model's config.pbtxt, from the JSON that Triton passes."""
    return {name: value["string_value"] for name, value in json.loads(model_config).get("parameters", {}).items()}


def declared(model_config: str) -> ModelInterface:
    """The tensors of a model's completed configuration, from the JSON that Triton passes."""
    config = json.loads(model_config)
    inputs, outputs = (tuple(map(_declared_spec, config.get(kind, ()))) for kind in ("input", "output"))
    return ModelInterface(inputs, outputs)


def _declared_spec(tensor: Mapping[str, Any]) -> TensorSpec:
    dtype = str(tensor["data_type"]).removeprefix("TYPE_").replace("STRING", "BYTES")
    return TensorSpec(tensor["name"], dtype, tuple(map(int, tensor["dims"])), bool(tensor.get("optional")))


class StageAnswers:
    """Answers the calls to one stage; one that fails gets its error, the others their results."""

    def __init__(self, run: Run, info: StageInfo, gpu_tensor_bytes: int) -> None:
        self._run, self._info, self._gpu_tensor_bytes = run, info, gpu_tensor_bytes
        self._guard = DeviceGuard(info.model, info.device)

    def to(self, requests: Sequence[Any]) -> list[Any]:
        """A response to each request, in order."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        try:
            wanted = list(request.requested_output_names())
            with self._guard.watch():
                inputs = {tensor.name(): _input_value(tensor) for tensor in request.inputs()}
                if not self._info.answers(wanted):
                    count_arrivals(self._info.arrivals, inputs)
                results = self._run(inputs, wanted)
                results = {name: results[name] for name in wanted if name in results}
                sent = ready_to_send(results, self._gpu_tensor_bytes)
            return pb_utils.InferenceResponse([_output_tensor(name, tensor) for name, tensor in sent.items()])
        except Exception as error:
            return pb_utils.InferenceResponse(output_tensors=[], error=triton_error(error))


def triton_error(error: Exception) -> Any:
    """Any exception as Triton's error. What nobody foresaw is logged with its trace and sent without it."""
    if not isinstance(error, DeepstackError):
        pb_utils.Logger.log_error("".join(traceback.format_exception(error)))
        error = StageError(f"unexpected {type(error).__name__}: {error}")
    return pb_utils.TritonError(error.to_wire(), getattr(pb_utils.TritonError, ErrorCode(error.code).name))


def serve(request: Any, submit: Callable[[dict[str, list[Any]], dict[str, Any], TritonReply], None]) -> None:
    """Hand a decoupled request over with its reply; whatever fails on the way ends the reply."""
    reply = TritonReply(request)
    try:
        submit(_client_inputs(request), _client_parameters(request), reply)
    except Exception as error:
        reply.fail(error)


def _client_inputs(request: Any) -> dict[str, list[Any]]:
    """The elements of a client's input tensors, by name."""
    return {tensor.name(): tensor.as_numpy().reshape(-1).tolist() for tensor in request.inputs()}


def _client_parameters(request: Any) -> dict[str, Any]:
    """A client's request parameters, without those that Triton reserves for itself."""
    parameters = json.loads(request.parameters() or "{}")
    return {
        name: value for name, value in parameters.items() if name not in RESERVED and not name.startswith("triton_")
    }


class TritonReply:
    """The reply to one request: exactly one final response, and nothing touches the sender after it.

    Asking the sender whether the request is cancelled after its final response crashes the server, hence the lock.
    """

    def __init__(self, request: Any) -> None:
        self._sender = request.get_response_sender()
        self._lock = threading.Lock()
        self._done = False

    def send(self, output: Output, *, final: bool) -> None:
        """One response."""
        self._respond(lambda: pb_utils.InferenceResponse(_output_tensors(output)), final)

    def fail(self, error: Exception) -> None:
        """The final response, an error."""
        self._respond(lambda: pb_utils.InferenceResponse(output_tensors=[], error=triton_error(error)), True)

    def is_cancelled(self) -> bool:
        """Whether the client is gone; False once the final response is sent."""
        with self._lock:
            try:
                return not self._done and bool(self._sender.is_cancelled())
            except Exception:
                pb_utils.Logger.log_error(traceback.format_exc())
                return False

    def _respond(self, make: Callable[[], Any], final: bool) -> None:
        with self._lock:
            if self._done:
                return
            self._done = final
            try:
                self._sender.send(make(), flags=FINAL if final else 0)
            except Exception:
                self._done = True
                self._give_up()

    def _give_up(self) -> None:
        """A response could not be made or sent: without a final one the client would wait for ever."""
        try:
            pb_utils.Logger.log_error(traceback.format_exc())
            error = pb_utils.TritonError("[INTERNAL] the response could not be sent; the server's log says why")
            self._sender.send(pb_utils.InferenceResponse(output_tensors=[], error=error), flags=FINAL)
        except Exception:
            pb_utils.Logger.log_error(traceback.format_exc())


class TritonStagePort:
    """Calls to the stages by BLS, from any thread.

    Outputs stay where the stage has left them, which is what Triton does unless a call names a preferred memory: large
    features on their GPU, so that they can be passed on, all others on the host, so that they can be read. The first of
    the former gives this process a CUDA context, which needs little: it runs no kernels.
    """

    def __init__(self, encoder: str = VISION_ENCODER) -> None:
        self._encoder = encoder
        self._has_context = False

    def call(self, model: str, inputs: Mapping[str, Array | Handle], outputs: Sequence[str]) -> dict[str, Handle]:
        tensors = [
            pb_utils.Tensor(name, value) if isinstance(value, np.ndarray) else value for name, value in inputs.items()
        ]
        try:
            request = pb_utils.InferenceRequest(model_name=model, requested_output_names=list(outputs), inputs=tensors)
            response = request.exec()
        except Exception as error:
            raise StageError(f"{model}: {error}") from error
        if response.has_error():
            failure = from_wire(response.error().message())
            raise type(failure)(f"{model}: {failure}")
        return {tensor.name(): tensor for tensor in response.output_tensors()}

    def call_encoder(self, files: MediaFiles, outputs: Sequence[str]) -> dict[str, Handle]:
        return self.call(self._encoder, media_tensors(files), outputs)

    def array(self, handle: Handle) -> Array:
        array: Array = handle.as_numpy()
        return array

    def empty(self, spec: TensorSpec) -> Handle:
        return _output_tensor(spec.name, torch.zeros([max(size, 0) for size in spec.shape], dtype=DTYPES[spec.dtype]))

    def zeros(self, name: str, handle: Handle) -> Handle:
        like = from_dlpack(handle)
        return _output_tensor(name, torch.zeros(like.shape, dtype=like.dtype))  # a host tensor, wherever `handle` is

    def is_on_host(self, handle: Handle) -> bool:
        on_host = bool(handle.is_cpu())
        if not on_host and not self._has_context:
            self._has_context = True
            trim_stacks()
        return on_host

    def join(self, name: str, handles: Sequence[Handle]) -> Handle:
        if len(handles) == 1:
            return handles[0]
        if not all(map(self.is_on_host, handles)):
            raise StageError(f"{name!r} of several requests stays on a GPU: each goes in a call of its own")
        return _output_tensor(name, torch.cat([from_dlpack(handle) for handle in handles]))


class Gauges:
    """Triton metrics by name, in the server's own metrics endpoint."""

    def __init__(self, descriptions: Mapping[str, str], counters: frozenset[str]) -> None:
        kinds = pb_utils.MetricFamily
        self._families = {
            name: kinds(name=name, description=text, kind=kinds.COUNTER if name in counters else kinds.GAUGE)
            for name, text in descriptions.items()
        }
        self._metrics = {name: family.Metric(labels={}) for name, family in self._families.items()}
        self._counters = counters
        self._values: dict[str, float] = {}

    def set(self, values: Mapping[str, float]) -> None:
        """Set gauges, raise counters to the totals given. What is as it was costs no call: one holds up all threads."""
        for name, value in values.items():
            if value == self._values.get(name):  # the first time, a process that is gone may have left another value
                continue
            if name in self._counters:
                self._metrics[name].increment(value - self._values.get(name, 0.0))
            else:
                self._metrics[name].set(value)
            self._values[name] = value


def _declaration(spec: TensorSpec) -> dict[str, Any]:
    dtype = "STRING" if spec.dtype == "BYTES" else spec.dtype
    return {"name": spec.name, "data_type": f"TYPE_{dtype}", "dims": list(spec.shape)}


def _input_value(tensor: Any) -> Any:
    """BYTES as a list of bytes, everything else as a torch tensor over the same memory."""
    if tensor.is_cpu() and tensor.name() in FILE_NAMES:
        return tensor.as_numpy().reshape(-1).tolist()
    return from_dlpack(tensor)


def _output_tensor(name: str, tensor: torch.Tensor) -> Any:
    """Over the same memory. Its values are there, so no stream (-1) has to wait, as the stub's own would for each."""
    return pb_utils.Tensor.from_dlpack(name, tensor.__dlpack__(stream=-1))


def _output_tensors(output: Output) -> list[Any]:
    """`text_output`, and what the client asked for by the return_* inputs. Most responses are the text alone."""
    options = output.options
    values = {"text_output": _text(output.text)}
    if options.finish_reason:
        values["finish_reason"] = _text(str(output.finish_reason))
    if options.cumulative_logprob:
        values["cumulative_logprob"] = np.array([output.cumulative_logprob], dtype=np.float32)
    if options.logprobs:
        values["logprobs"] = _text(json.dumps(output.logprobs))
    if options.num_input_tokens:
        values["num_input_tokens"] = np.array([output.input_tokens], dtype=np.uint32)
    if options.num_output_tokens:
        values["num_output_tokens"] = np.array([output.output_tokens], dtype=np.uint32)
    return [pb_utils.Tensor(name, value) for name, value in values.items()]


def _text(value: str) -> Array:
    return np.array([value.encode()], dtype=np.object_)
