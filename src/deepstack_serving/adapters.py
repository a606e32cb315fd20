"""What the four model.py files hand their Triton callbacks to: one class per kind of model.

Configurations are completed from the checkpoint and the split, so a stage declares exactly the tensors that it takes.
Completing runs in a process of its own, hence the late imports: it needs neither model code nor processors.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from deepstack_serving import triton_bridge as bridge
from deepstack_serving.checkpoint import Checkpoint, open_checkpoint
from deepstack_serving.pipelines import Pipelines
from deepstack_serving.settings import Settings, load_settings
from deepstack_serving.stages.cpu_threads import bind_cpu_threads, use_one_cpu_thread
from deepstack_serving.stages.device import stage_device, use_device
from deepstack_serving.stages.media_call import media_files
from deepstack_serving.stages.place import StagePlace
from deepstack_serving.wire import (
    ORCHESTRATOR,
    ORCHESTRATOR_INTERFACE,
    check_declared,
    language_interface,
    vision_interface,
)

if TYPE_CHECKING:
    from deepstack_serving.engine.engine import Engine

METRICS_INTERVAL_S = 0.2
THREAD_SWITCH_S = 0.0005  # how long the engine waits for the interpreter while text is made and sent, at most
METRICS = {
    "deepstack_ready": "1 while all stages answer, belong together and the engine goes round, else 0",
    "deepstack_active_requests": "Requests whose client still waits for its final response",
    "deepstack_waiting_requests": "Requests that wait for KV blocks",
    "deepstack_running_requests": "Requests that hold KV blocks",
    "deepstack_kv_blocks_free": "KV blocks that no request holds",
    "deepstack_kv_blocks_total": "KV blocks of each language stage",
    "deepstack_prompt_tokens_total": "Prompt tokens computed since the start",
    "deepstack_generated_tokens_total": "Tokens generated since the start",
    "deepstack_engine_steps_total": "Steps of the engine since the start",
}
COUNTERS = frozenset(name for name in METRICS if name.endswith(("_tokens_total", "_steps_total")))


class VisionModel:
    """vision_encoder."""

    @staticmethod
    def declare(config: Any) -> Any:
        return bridge.declare(config, vision_interface(_checkpoint(load_settings()).contract))

    def __init__(self, model_config: str) -> None:
        from deepstack_serving.stages.vision import VisionStage

        settings, name = load_settings(), bridge.name_of(model_config)
        checkpoint = _checkpoint(settings)
        check_declared(name, bridge.declared(model_config), vision_interface(checkpoint.contract))
        use_device(stage_device(settings, name))
        self._stage = VisionStage(settings, checkpoint, name)
        self._answers = bridge.StageAnswers(self._run, self._stage.info, settings.gpu_tensor_bytes)
        _leave_loaded_objects_alone()

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        return self._answers.to(requests)

    def _run(self, inputs: Mapping[str, Any], wanted: Sequence[str]) -> Mapping[str, torch.Tensor]:
        return self._stage.run(media_files(inputs), wanted)

    def close(self) -> None:
        self._stage.close()


class LanguageModel:
    """A language stage; its place among the stages is in its config.pbtxt."""

    @staticmethod
    def declare(config: Any) -> Any:
        parameters = {name: value["string_value"] for name, value in config.as_dict()["parameters"].items()}
        settings, place = load_settings(), StagePlace.parse(parameters)
        checkpoint = _checkpoint(settings)
        plan = place.plans(settings, checkpoint)[place.index]
        return bridge.declare(config, language_interface(checkpoint.contract, plan))

    def __init__(self, model_config: str) -> None:
        from deepstack_serving.stages.language import LanguageStage

        settings, place = load_settings(), StagePlace.parse(bridge.parameters_of(model_config))
        checkpoint = _checkpoint(settings)
        plans = place.plans(settings, checkpoint)
        interface = language_interface(checkpoint.contract, plans[place.index])
        check_declared(place.names[place.index], bridge.declared(model_config), interface)
        device = stage_device(settings, place.names[place.index])
        use_device(device)
        if device == "cpu":
            bind_cpu_threads(settings)
        stage = LanguageStage(settings, checkpoint, plans, place.names, place.index, place.pipelines.languages)
        self._answers = bridge.StageAnswers(stage.run, stage.info, settings.gpu_tensor_bytes)
        _leave_loaded_objects_alone()

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        return self._answers.to(requests)


class OrchestratorModel:
    """orchestrator: decoupled; `execute` only validates and enqueues."""

    def __init__(self, model_config: str) -> None:
        from deepstack_serving.engine.orchestrator import Orchestrator
        from deepstack_serving.engine.sharing import SharedDoor

        check_declared(ORCHESTRATOR, bridge.declared(model_config), ORCHESTRATOR_INTERFACE)
        settings, pipelines = load_settings(), Pipelines.parse(bridge.parameters_of(model_config))
        use_one_cpu_thread()
        self._door = SharedDoor(
            Orchestrator(settings, bridge.TritonStagePort(encoder), stages) for encoder, stages in pipelines.members
        )
        self._gauges = bridge.Gauges(METRICS, COUNTERS)
        self._closing = threading.Event()
        self._reporter = threading.Thread(target=self._report, name="metrics", daemon=True)
        _leave_loaded_objects_alone()
        sys.setswitchinterval(THREAD_SWITCH_S)
        self._door.start()
        self._reporter.start()

    def execute(self, requests: Sequence[Any]) -> None:
        for request in requests:
            bridge.serve(request, self._door.submit)

    def is_ready(self) -> bool:
        return self._door.is_healthy

    def close(self) -> None:
        self._closing.set()
        self._door.close()
        self._reporter.join()
        self._gauges.set(self._values())  # the server keeps the last values, and a drain waits for them

    def _report(self) -> None:
        while not self._closing.wait(METRICS_INTERVAL_S):
            self._gauges.set(self._values())

    def _values(self) -> dict[str, float]:
        sums = Counter[str]()
        for engine in self._door.engines:
            sums.update(_values_of(engine))
        return {"deepstack_ready": float(self.is_ready()), **sums}


def _values_of(engine: Engine) -> dict[str, int]:
    """Of one pipeline."""
    scheduler, stats = engine.scheduler, engine.stats
    return {
        "deepstack_active_requests": engine.outputs.active,
        "deepstack_waiting_requests": len(scheduler.waiting),
        "deepstack_running_requests": len(scheduler.running),
        "deepstack_kv_blocks_free": scheduler.allocator.free,
        "deepstack_kv_blocks_total": scheduler.allocator.total,
        "deepstack_prompt_tokens_total": stats.prompt_tokens,
        "deepstack_generated_tokens_total": stats.generated_tokens,
        "deepstack_engine_steps_total": stats.steps,
    }


def _checkpoint(settings: Settings) -> Checkpoint:
    return open_checkpoint(settings.checkpoint, settings.dtype, merge_adapter=settings.merge_adapter)


def _leave_loaded_objects_alone() -> None:
    """What loading made stays until the end; a collection that went through all of it would hold up a step."""
    gc.collect()
    gc.freeze()
