"""How a language stage runs its steps: which sizes it pads to, what it compiles, and what it captures at start-up."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import transformers

from deepstack_serving.errors import SettingsError
from deepstack_serving.execution.advance import advance
from deepstack_serving.execution.buckets import needed_sizes
from deepstack_serving.execution.exclusive import exclusive
from deepstack_serving.execution.layers import DecoderLayers, LayerFunctions
from deepstack_serving.execution.recorder import Recorder
from deepstack_serving.execution.runner import CompiledStep, Ends, Head, Sizes, StepRunner
from deepstack_serving.gpu_memory import free_bytes, in_gibibytes
from deepstack_serving.kv_pool import KVPool
from deepstack_serving.settings import Settings

MAX_PREFILL_SEQUENCES = 256  # of a captured step: each costs idle programs in the attention of every layer


def step_sizes(settings: Settings, pool: KVPool, max_context_length: int) -> Sizes:
    """What the steps of these settings are padded to."""
    context = settings.max_context_length or max_context_length
    return Sizes(
        needed_sizes(settings.decode_batch_sizes, settings.max_running_requests),
        needed_sizes(settings.prefill_graph_tokens, settings.prefill_token_budget),
        min(settings.max_running_requests, MAX_PREFILL_SEQUENCES),
        min(-(-context // pool.block_size), pool.blocks),
    )


def check_execution(settings: Settings, device: str) -> None:
    """Raises SettingsError when the settings ask for graphs where there are none."""
    if settings.execution == "graph" and device == "cpu":
        raise SettingsError("setting 'execution' is 'graph', but this stage is on a CPU: set it to auto or eager")


def make_runner(settings: Settings, layers: DecoderLayers, pool: KVPool, sizes: Sizes, ends: Ends) -> StepRunner:
    """The runner of a stage on a GPU, its layers compiled as the settings say."""
    on_cpu = pool.keys.device.type == "cpu"
    compiled = None if on_cpu or settings.compile == "off" else _compile(settings, layers, ends.head)
    return StepRunner(layers, pool, sizes, ends, compiled)


@contextmanager
def compiling_alone(settings: Settings, device: str, stage: object, *, compiles: bool) -> Iterator[None]:
    """Stands around the first runs of compiled code; see `exclusive`. `stage`: what tells its code from others', as
    its `repr` shows it.
    """
    if not compiles:
        yield
        return
    from deepstack_serving.execution.compiled import end_compilers  # slow to import

    sizes = (settings.compile, settings.decode_batch_sizes, settings.prefill_graph_tokens, settings.block_size)
    versions = (torch.__version__, transformers.__version__)
    gpu = torch.cuda.get_device_name(device) if device.startswith("cuda") else device
    code = hashlib.sha256(repr((stage, sizes, versions, gpu)).encode()).hexdigest()
    try:
        with exclusive(settings.compile_cache_folder, device, code):
            yield
    finally:
        end_compilers()


def start_graphs(settings: Settings, layers: DecoderLayers, runner: StepRunner, recorder: Recorder) -> None:
    """Capture all graphs, or go on eagerly where the settings allow it. Raises SettingsError."""
    started, logger, free = time.monotonic(), logging.getLogger(__name__), free_bytes(runner.device)
    try:
        refusal = layers.family.capture_refusal(layers.model.config)
        if refusal is not None:
            raise SettingsError(f"setting 'execution': {refusal}; set it to 'eager', or 'graph_fallback' to true")
        stage = (layers.plan, layers.model.config)
        with compiling_alone(settings, runner.device, stage, compiles=runner.is_compiled):
            runner.capture(recorder)
    except SettingsError as error:
        if not settings.graph_fallback:
            raise
        logger.warning("steps run eagerly, as 'graph_fallback' allows: %s", error)
        return
    taken = in_gibibytes(free - (free_bytes(runner.device) or 0)) if free else "no memory of a GPU"
    logger.info("captured %d graphs in %.1f s: %s", runner.captured, time.monotonic() - started, taken)


def _compile(settings: Settings, layers: DecoderLayers, head: Head | None) -> CompiledStep:
    from deepstack_serving.execution.compiled import (
        CompiledLayers,
        compile_exact,
        prepare_compilations,
    )  # slow to import

    prepare_compilations(settings)
    modules = layers.family.text_model(layers.model).layers
    own = {layer: modules[layer] for layer in range(layers.plan.first_layer, layers.plan.end_layer)}
    decode = CompiledLayers(own, dynamic=False, autotune=settings.compile == "autotune")
    prefill = CompiledLayers(own, dynamic=True, autotune=False)
    return CompiledStep(
        LayerFunctions(decode, compile_exact(layers.rotary)),
        LayerFunctions(prefill, layers.rotary),
        compile_exact(head) if head else None,
        compile_exact(advance),
    )
