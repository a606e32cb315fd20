"""Trains the demo checkpoint: `python -m demo.train --out demo/checkpoints/qwen3_vl_digits --device cuda`.

Seeded; prints its progress; stops by step count or, if that comes first, by time, with the learning rate at its end
either way. Then it evaluates on held-out digits and writes the figures to training.json beside the weights.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.utils.data import DataLoader
from transformers import Qwen3VLForConditionalGeneration

from demo.architecture import DEEPSTACK_BLOCKS, WIDTH, build_model, save_checkpoint
from demo.batches import MAIN_DROP, Batch, TrainingBatches
from demo.digits import load_split
from demo.evaluate import evaluate_folder
from demo.graphed import StepRunner
from demo.learner import PROBE_WEIGHT, Probes, training_loss
from demo.prefetch import fetch_ahead
from demo.tokenizer import train_tokenizer

REPORT_EVERY = 200
WARM_UP_STEPS = 300


@dataclass(frozen=True)
class Plan:
    """What to train with; written into training.json as it is."""

    steps: int
    limit_s: float
    rows: int
    seed: int
    peak_rate: float
    weight_decay: float
    workers: int
    device: str


@dataclass(frozen=True)
class Outcome:
    """How training ended."""

    steps: int
    seconds: float
    pictures: int
    last_loss: float


def main() -> None:
    """Train, save, evaluate, report."""
    arguments = _parse_arguments()
    plan = Plan(
        steps=arguments.steps,
        limit_s=arguments.limit_s,
        rows=arguments.rows,
        seed=arguments.seed,
        peak_rate=arguments.peak_rate,
        weight_decay=0.05,
        workers=arguments.workers,
        device=arguments.device,
    )
    folder = Path(arguments.out)
    outcome = train(plan, folder)
    figures = evaluate_folder(folder, arguments.evaluate, arguments.device)
    write_report(folder, plan, outcome, figures)


def train(plan: Plan, folder: Path) -> Outcome:
    """Train from fresh weights and write the checkpoint folder."""
    torch.manual_seed(plan.seed)
    torch.set_float32_matmul_precision("high")
    tokenizer = train_tokenizer()
    model: Any = build_model(tokenizer)
    model.to(plan.device).train()
    print(f"{sum(value.numel() for value in model.parameters()):,} parameters on {plan.device}", flush=True)
    batches = TrainingBatches(load_split().train, tokenizer.to_str(), plan.rows, plan.steps, plan.seed)
    outcome = _run_steps(plan, model, _load(plan, batches))
    save_checkpoint(model, tokenizer, folder)
    return outcome


def learning_rate(plan: Plan, step: int, elapsed_s: float) -> float:
    """Warm up, then a cosine over whichever of steps and time is further on."""
    progress = min(1.0, max(step / plan.steps, elapsed_s / plan.limit_s))
    warm_up = min(1.0, (step + 1) / min(WARM_UP_STEPS, max(1, plan.steps // 5)))
    return plan.peak_rate * warm_up * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))


def write_report(folder: Path, plan: Plan, outcome: Outcome, figures: dict[str, Any]) -> None:
    """training.json: when, where, with what, for how long, and how good it became."""
    hardware = torch.cuda.get_device_name() if plan.device.startswith("cuda") else platform.processor()
    report = {
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": f"{hardware or platform.machine()}, {os.cpu_count()} CPU cores",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "plan": {**asdict(plan), "main_embeddings_dropped": MAIN_DROP, "probe_weight": PROBE_WEIGHT},
        "outcome": asdict(outcome),
        "held_out": figures,
    }
    text = json.dumps(report, indent=2)
    (folder / "training.json").write_text(text + "\n")
    print(text, flush=True)


def _run_steps(plan: Plan, model: Qwen3VLForConditionalGeneration, loader: Iterator[Batch]) -> Outcome:
    probes = Probes(len(DEEPSTACK_BLOCKS), WIDTH).to(plan.device)
    parameters = [*model.parameters(), *probes.parameters()]
    run = StepRunner(
        lambda batch: training_loss(model, probes, batch),
        torch.tensor([1.0, PROBE_WEIGHT], device=plan.device),
        parameters,
    )
    optimizer = _optimizer(plan, parameters)
    started, losses, pictures, step, waited_s = time.monotonic(), torch.zeros(2), 0, 0, 0.0
    asked = started
    for step, batch in enumerate(fetch_ahead(loader), start=1):
        now = time.monotonic()
        waited_s += now - asked
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(plan, step - 1, now - started)
        losses = run(batch)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        pictures += len(batch.patches)
        if step % REPORT_EVERY == 0:
            answers, probed = losses.tolist()
            print(f"step {step}  answers {answers:.4f}  probes {probed:.4f}  {now - started:.0f} s", end="  ")
            print(f"(waited {waited_s:.0f} s for batches)", flush=True)
        if now - started > plan.limit_s:
            break
        asked = time.monotonic()
    return Outcome(step, round(time.monotonic() - started, 1), pictures, round(losses[0].item(), 5))


def _optimizer(plan: Plan, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW with weight decay for matrices only."""
    groups = [
        {"params": [value for value in parameters if value.ndim >= 2], "weight_decay": plan.weight_decay},
        {"params": [value for value in parameters if value.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=plan.peak_rate, betas=(0.9, 0.98), fused=plan.device != "cpu")


def _load(plan: Plan, batches: TrainingBatches) -> Iterator[Batch]:
    loader = DataLoader(
        batches,
        batch_size=None,
        num_workers=plan.workers,
        prefetch_factor=6 if plan.workers else None,
        worker_init_fn=_use_one_thread,
    )
    return iter(loader)


def _use_one_thread(_worker: int) -> None:
    torch.set_num_threads(1)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True, help="checkpoint folder to write")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=9000)
    parser.add_argument("--limit-s", type=float, default=420.0, help="seconds of training at most")
    parser.add_argument("--rows", type=int, default=256, help="questions per step")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--peak-rate", type=float, default=1.2e-3)
    parser.add_argument("--workers", type=int, default=max(0, (os.cpu_count() or 1) - 1))
    parser.add_argument("--evaluate", type=int, default=500, help="held-out pictures")
    return parser.parse_args()


if __name__ == "__main__":
    main()
