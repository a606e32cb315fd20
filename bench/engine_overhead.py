"""What the orchestrator itself costs: 64 running sequences over fake stages; no server, no model.

`python -m bench.engine_overhead CHECKPOINT` prints, per decode step and per token, the processor time of the engine's
and the output worker's threads, as JSON. Only tokenizer and configs of the checkpoint are read. The two threads share
one interpreter, so their processor times add up; what Triton's calls cost comes on top.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deepstack_serving.checkpoint import Checkpoint, open_checkpoint
from deepstack_serving.engine.orchestrator import Orchestrator
from deepstack_serving.engine.ports import Array, Output
from deepstack_serving.errors import DeepstackError
from deepstack_serving.injection import plan_stages
from deepstack_serving.media import MediaFiles
from deepstack_serving.settings import parse_settings
from deepstack_serving.stages.info import StageInfo
from deepstack_serving.wire import STAGE_INFO, VISION_ENCODER, TensorSpec

NAMES = ("language_early", "language_late")
_BLOCK_SIZE = 16
_TOP = 4
_MICROSECONDS = 1e6


class FakeStages:
    """Implements StagePort: answers each decode step after `step_s`, with tokens that end no sequence."""

    def __init__(self, checkpoint: Checkpoint, names: Sequence[str], blocks: int, step_s: float) -> None:
        self._step_s = step_s
        plans = plan_stages(checkpoint.layer_count, len(names), None, checkpoint.deepstack_layers)
        about = (checkpoint.fingerprint, checkpoint.contract.dtype, "cpu", StageInfo.new_instance())
        self._infos = {VISION_ENCODER: StageInfo(VISION_ENCODER, *about)}
        for name, plan in zip(names, plans, strict=True):
            self._infos[name] = StageInfo(name, *about, plan.first_layer, plan.end_layer, blocks, _BLOCK_SIZE)
        self._hidden = np.zeros((0, checkpoint.contract.hidden_size), dtype=np.float32)
        self._ids = np.random.default_rng(0).integers(64, 128, 1 << 16)

    def call(self, model: str, inputs: Mapping[str, Any], outputs: Sequence[str]) -> dict[str, Array]:
        if STAGE_INFO.name in outputs:
            return {STAGE_INFO.name: self._infos[model].to_tensor().numpy()}
        if "sample_rows" not in inputs:
            return {"hidden_states": self._hidden}
        steps = int(inputs["decode_steps"][0]) if "decode_steps" in inputs else 1
        rows = len(inputs["sample_rows"]) * steps
        if self._step_s:
            time.sleep(self._step_s * steps)
        results: dict[str, Array] = {"next_ids": self._ids[:rows], "logprobs": np.full(rows, -1.0, dtype=np.float32)}
        if "top_count" in inputs:
            results["top_ids"] = np.zeros((rows, _TOP), dtype=np.int64)
            results["top_logprobs"] = np.zeros((rows, _TOP), dtype=np.float32)
        return results

    def call_encoder(self, _files: MediaFiles, outputs: Sequence[str]) -> dict[str, Array]:
        return self.call(VISION_ENCODER, {}, outputs)

    def array(self, handle: Array) -> Array:
        return handle

    def empty(self, spec: TensorSpec) -> Array:
        return np.zeros([max(size, 0) for size in spec.shape])

    def zeros(self, _name: str, handle: Array) -> Array:
        return np.zeros_like(handle)

    def is_on_host(self, _handle: Array) -> bool:
        return True

    def join(self, _name: str, handles: Sequence[Array]) -> Array:
        return np.concatenate(handles)


class CountingReply:
    """Implements ReplyPort."""

    def __init__(self) -> None:
        self.tokens = self.responses = 0
        self.done = threading.Event()
        self.error: DeepstackError | None = None

    def send(self, output: Output, *, final: bool) -> None:
        self.tokens += output.output_tokens
        self.responses += 1
        if final:
            self.done.set()

    def fail(self, error: DeepstackError) -> None:
        self.error = error
        self.done.set()

    def is_cancelled(self) -> bool:
        return False


def measure(
    folder: Path,
    sequences: int,
    tokens: int,
    names: Sequence[str],
    settings: Mapping[str, str],
    sampling: str,
    step_s: float = 0.0,
) -> dict[str, float]:
    """Microseconds of one run, and how many tokens a response carried."""
    parsed = parse_settings({"checkpoint": str(folder), "device": "cpu", **settings})
    checkpoint = open_checkpoint(parsed.checkpoint, parsed.dtype)
    stages = FakeStages(checkpoint, names, sequences * (tokens // _BLOCK_SIZE + 8), step_s)
    made = Orchestrator(parsed, stages, names)
    replies = [CountingReply() for _ in range(sequences)]
    options = {"max_tokens": tokens, "ignore_eos": True, "temperature": 0, **json.loads(sampling)}
    inputs: dict[str, list[Any]] = {"text_input": ["hello"], "stream": [True]}
    for reply in replies:
        made.submit({**inputs, "sampling_parameters": [json.dumps(options)]}, {}, reply)
    started_s = time.perf_counter()
    made.start()
    clocks = dict(_thread_clocks())
    for reply in replies:
        reply.done.wait()
        if reply.error is not None:
            raise reply.error
    wall_s = time.perf_counter() - started_s
    spent = {name: time.clock_gettime(clock) for name, clock in clocks.items()}
    steps = made.engine.stats.steps
    made.close()
    total = sum(reply.tokens for reply in replies)
    return {
        "steps": steps,
        "engine_us_per_step": spent["engine"] / steps * _MICROSECONDS,
        "output_us_per_token": spent["outputs"] / total * _MICROSECONDS,
        "tokens_per_response": total / sum(reply.responses for reply in replies),
        "tokens_per_second": total / wall_s,
    }


def _thread_clocks() -> Iterator[tuple[str, int]]:
    for thread in threading.enumerate():
        if thread.name in ("engine", "outputs") and thread.ident is not None:
            yield thread.name, time.pthread_getcpuclockid(thread.ident)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--stages", type=int, choices=(1, 2), default=2)
    parser.add_argument("--setting", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--step-ms", type=float, default=0.0, help="what the stages take for a decode step")
    parser.add_argument("--sampling", default="{}", help="JSON, as in requests")
    options = parser.parse_args(arguments)
    names = NAMES if options.stages == 2 else ("language",)
    settings = dict(item.split("=", 1) for item in options.setting)
    counts = (options.sequences, options.tokens)
    figures = measure(options.checkpoint, *counts, names, settings, options.sampling, options.step_ms / 1e3)
    print(json.dumps({name: round(value, 2) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
