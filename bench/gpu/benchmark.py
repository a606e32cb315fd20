"""One call of `bench.h200`: a shape, its checkpoint, and the arms one after another until the time is over."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.failures import BenchError
from bench.gpu import vllm
from bench.gpu.arms import Command, run_arm
from bench.gpu.generate import GeneratePlan
from bench.gpu.hardware import gpus
from bench.gpu.memory import bytes_read_per_step
from bench.gpu.server_arm import ServerPlan
from bench.gpu.shapes import TINY, Shape, shape
from bench.machine import command_line, describe
from bench.serving import say
from deepstack_serving.errors import DeepstackError

ARMS = ("limits", "server", "generate", "vllm")
_LIMITS_S = {"checkpoint": 240.0, "limits": 60.0, "server": 420.0, "generate": 150.0, "vllm": 300.0}
_SHORTEST_S = 10.0  # with less time left an arm is not begun
_PHASE_LIMIT_S = 120.0
_SETTINGS = {"kv_pool_tokens": "131072", "vision_cache_bytes": "0"}
_TINY_SETTINGS = {"kv_pool_tokens": "8192", "vision_cache_bytes": "0", "device": "cpu", "cpu_threads": "1"}
_SHARED_MEMORY = Path("/dev/shm")

Planned = list[tuple[Command, dict[str, Any]]]  # arms to run, each with what its record says besides


class Benchmark:
    """`arguments` are those of `bench.h200`; `run` grows arm by arm."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._shape: Shape = shape(arguments.shape)
        self._ends_s = time.monotonic() + arguments.limit_s
        self._device = "cuda" if gpus() and arguments.shape != TINY else "cpu"
        self._checkpoint = (arguments.checkpoints or _checkpoint_folder()) / self._shape.name
        self.run: dict[str, Any] = {
            **describe(command_line("bench.h200")),
            "gpus": gpus(),
            "shape": self._shape.name,
            "checkpoint": None,
            "arms": [],
        }

    def measure(self, save: Callable[[], None]) -> None:
        """All arms that were asked for; `save` is called after each. Raises BenchError without a checkpoint."""
        self._write_checkpoint()
        arms = {"limits": self._limits, "server": self._server, "generate": self._generate, "vllm": self._vllm}
        for name in self._arguments.arms:
            try:
                for command, facts in arms[name]():
                    self.run["arms"].append({**self._timed(command), **facts})
                    save()
            except (BenchError, DeepstackError) as error:
                say(f"{name}: {error}")
                self.run["arms"].append({"arm": name, "phases": [], "error": str(error)})
            save()

    def _write_checkpoint(self) -> None:
        tokenizer = self._arguments.tokenizer
        options = ["--tokenizer", str(tokenizer.absolute())] if tokenizer else []
        target = [self._shape.name, str(self._checkpoint.absolute()), "--device", self._device, *options]
        limit_s = _LIMITS_S["checkpoint"]
        record = self._timed(Command.of_module("checkpoint", "bench.gpu.checkpoint", target, limit_s))
        if not record["phases"]:
            raise BenchError(f"no checkpoint: {record.get('error')}; the error is above")
        self.run["checkpoint"] = {
            **record["phases"][0]["result"],
            "bytes_read_per_step": bytes_read_per_step(self._checkpoint),
        }

    def _timed(self, command: Command) -> dict[str, Any]:
        left_s = self._ends_s - time.monotonic()
        if left_s < _SHORTEST_S:
            return {"arm": command.name, "phases": [], "error": "no time was left"}
        return run_arm(replace(command, limit_s=min(command.limit_s, left_s)))

    def _limits(self) -> Planned:
        return [(Command.of_module("limits", "bench.gpu.limits", [self._device], _LIMITS_S["limits"]), {})]

    def _server(self) -> Planned:
        chosen = dict(self._arguments.setting)
        chosen |= {"devices": self._arguments.devices} if self._arguments.devices else {}
        settings = {**(_TINY_SETTINGS if self._shape.name == TINY else _SETTINGS), **chosen}
        made: Planned = []
        for stages in self._arguments.stages:
            plan = self._server_plan(stages, settings)
            command = Command.of_module("server", "bench.gpu.server_arm", [plan.as_json()], _LIMITS_S["server"])
            about = {"stages": stages, "pipelines": plan.pipelines, "settings": settings, "chosen": chosen}
            made.append((command, about))
        return made

    def _server_plan(self, stages: int, settings: dict[str, str]) -> ServerPlan:
        given = self._arguments
        return ServerPlan(
            checkpoint=str(self._checkpoint),
            stages=stages,
            pipelines=given.pipelines,
            settings=settings,
            image_side_px=self._shape.image_side_px,
            image_tokens=self._shape.image_tokens,
            output_tokens=given.tokens,
            samples=given.samples,
            levels=given.clients,
            rounds=given.rounds,
            starts=given.starts,
            whole_answers=not given.streams_only,
            profile=given.profile,
            phase_limit_s=_PHASE_LIMIT_S,
            start_limit_s=_LIMITS_S["server"],
            server_folder=str(given.triton.absolute()) if given.triton else None,
            server_arguments=tuple(given.server_argument),
        )

    def _generate(self) -> Planned:
        given = self._arguments
        made: Planned = []
        for mode in given.modes:
            plan = GeneratePlan(
                mode=mode,
                checkpoint=str(self._checkpoint),
                device=self._device,
                dtype="bfloat16",
                image_side_px=self._shape.image_side_px,
                image_tokens=self._shape.image_tokens,
                output_tokens=given.tokens,
                samples=min(given.samples, 3),
                clients=max(given.clients),
                rounds=given.rounds,
                phase_limit_s=_PHASE_LIMIT_S,
            )
            name, arguments = f"generate {mode}", [plan.as_json()]
            made.append((Command.of_module(name, "bench.gpu.generate", arguments, _LIMITS_S["generate"]), {}))
        return made

    def _vllm(self) -> Planned:
        given, side_px = self._arguments, self._shape.image_side_px
        if given.vllm is None:
            raise BenchError("no --vllm folder")
        clients = max(given.clients)
        command = vllm.command(given.vllm, given.vllm_script, self._checkpoint, side_px, given.tokens, clients)
        return [(Command("vllm", command, _LIMITS_S["vllm"], vllm.parse_output), {})]


def _checkpoint_folder() -> Path:
    """Shared memory where it is, for the fastest way to a GPU; the space is checked when a checkpoint is written."""
    parent = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
    return parent / "deepstack-bench"
