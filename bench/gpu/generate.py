"""transformers on the same requests, in a process of its own: `python -m bench.gpu.generate PLAN`, PLAN as JSON.

Modes: `eager`, `static` (static cache, whose decode step transformers compiles on a GPU), and `batched` (transformers'
continuous batching, text only).
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from bench.failures import BenchError
from bench.figures import MILLISECONDS, median
from bench.gpu.arms import Phases
from bench.gpu.workload import Requests
from bench.records import Case, check, summary
from bench.reference import Reference
from deepstack_serving.checkpoint import open_config

MODES = ("eager", "static", "batched")
_OPTIONS: dict[str, dict[str, Any]] = {"eager": {}, "static": {"cache_implementation": "static"}, "batched": {}}
TEXT_MODEL = "text model of the same shape: "
_NEVER = -1  # an end-of-sequence token that no model gives


@dataclass(frozen=True)
class GeneratePlan:
    """What is measured, and how often; `clients` is how many requests are in flight in the mode `batched`."""

    mode: str
    checkpoint: str
    device: str
    dtype: str
    image_side_px: int
    image_tokens: int | None
    output_tokens: int
    samples: int
    clients: int
    rounds: int
    phase_limit_s: float

    def as_json(self) -> str:
        return json.dumps(asdict(self))


class GenerateArm:
    """`folder` is for pictures and is empty."""

    def __init__(self, plan: GeneratePlan, folder: Path) -> None:
        self._plan = plan
        self._phases = Phases(plan.phase_limit_s)
        self._requests = Requests(folder, plan.image_side_px, plan.output_tokens)

    def run(self) -> None:
        reference = self._phases.run("load", self._load_and_describe) and self._reference
        if reference is None:
            return
        if self._plan.mode == "batched":
            self._batched(reference)
            return
        count = 1 + self._plan.samples
        self._phases.run("image, 1 client", lambda: self._alone(self._images(count)))
        self._phases.run("text, 1 client", lambda: self._alone(self._requests.text(count)))

    def _load_and_describe(self) -> dict[str, Any]:
        plan = self._plan
        started_s = time.perf_counter()
        self._reference = Reference(Path(plan.checkpoint), plan.dtype, plan.device, **_OPTIONS[plan.mode])
        loaded_s = time.perf_counter() - started_s
        overheads = self._requests.learn(lambda case: self._reference.prepare(case)["input_ids"].shape[1])
        return {"seconds": loaded_s, "overheads": overheads}

    def _images(self, count: int) -> list[Case]:
        return self._requests.image(count, self._plan.image_tokens)

    def _alone(self, cases: Sequence[Case]) -> dict[str, Any]:
        """One after another, the first to warm up. `prepared_first_token_ms` leaves reading and cutting pixels out."""
        records, prepared_ms = [], []
        for case in cases:
            started_s = time.perf_counter()
            inputs = self._reference.prepare(case)
            _synchronise(self._plan.device)
            prepared_s = time.perf_counter() - started_s
            record = check(self._reference.answer(inputs, case.max_tokens, started_s), case)
            records.append(record)
            prepared_ms.append((record.first_s - prepared_s) * MILLISECONDS)
        first, *rest = records
        return {
            **summary(rest),
            "prepared_first_token_ms": median(prepared_ms[1:]),
            "input_tokens": records[-1].input_tokens,
            "warm_up_s": first.end_s,
        }

    def _batched(self, reference: Reference) -> None:
        """The vision model's own class first; where transformers cannot batch it, a text model of the same shape."""
        cases = self._requests.text(self._plan.clients * self._plan.rounds)
        prompts = [reference.prepare(case)["input_ids"][0].tolist() for case in cases]
        phase = f"text, {self._plan.clients} at once"
        if self._phases.run(phase, lambda: self._generate_batch(reference.model, prompts)) is None:
            reference.model = None  # its memory is wanted for the other one
            self._phases.run(TEXT_MODEL + phase, lambda: self._generate_batch(self._text_model(), prompts))

    def _text_model(self) -> Any:
        """transformers' dense text model in the language model's shape; random weights cost the same as any."""
        text = open_config(Path(self._plan.checkpoint)).config.text_config
        from transformers import Qwen3Config  # slow to import

        same = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        values = {name: getattr(text, name) for name in (*same, "num_key_value_heads", "head_dim")}
        if getattr(text, "num_experts", 0):
            raise BenchError("no dense text model has the shape of a model with experts")
        with torch.device(self._plan.device):
            model: Any = AutoModelForCausalLM.from_config(Qwen3Config(**values), dtype=getattr(torch, self._plan.dtype))
        return model.eval()

    def _generate_batch(self, model: Any, prompts: list[list[int]]) -> dict[str, Any]:
        tokens = self._plan.output_tokens
        config = GenerationConfig(
            max_new_tokens=tokens, do_sample=False, eos_token_id=_NEVER, pad_token_id=0, use_cache=True
        )
        warm_up_s = _timed(lambda: _answers(model, prompts, config))[0]
        wall_s, answers = _timed(lambda: _answers(model, prompts, config))
        wrong = [len(answer) for answer in answers if len(answer) != tokens]
        if wrong or len(answers) != len(prompts):
            raise BenchError(
                f"{len(answers)} of {len(prompts)} answers came, {len(wrong)} of another length: {wrong[:5]}"
            )
        return {
            "clients": self._plan.clients,
            "requests": len(prompts),
            "wall_s": wall_s,
            "tokens_per_s": len(prompts) * tokens / wall_s,
            "warm_up_s": warm_up_s,
        }


def _answers(model: Any, prompts: list[list[int]], config: GenerationConfig) -> list[list[int]]:
    results = model.generate_batch(inputs=prompts, generation_config=config, persistent_manager=True)
    failed = [result.error for result in results.values() if result.error is not None]
    if failed:
        raise BenchError(f"continuous batching failed: {failed[0]}")
    return [list(result.generated_tokens) for result in results.values()]


def _timed(call: Any) -> tuple[float, Any]:
    started_s = time.perf_counter()
    result = call()
    return time.perf_counter() - started_s, result


def _synchronise(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def main() -> None:
    plan = GeneratePlan(**json.loads(sys.argv[1]))
    with tempfile.TemporaryDirectory(prefix="deepstack-bench-") as folder:
        GenerateArm(plan, Path(folder)).run()


if __name__ == "__main__":
    main()
