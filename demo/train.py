"""Trains a demo checkpoint: `python -m demo.train --family granite --out FOLDER --device cuda`.

Seeded; prints its progress; stops by step count or, if that comes first, by time, with the learning rate at its end
either way. Then it evaluates on held-out digits and writes the figures to training.json beside the weights. With
`--backup` it also saves itself now and then, and `--resume` goes on from there with the next batches.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader

from demo.architectures import ARCHITECTURES, DEFAULT
from demo.backups import Progress, load_backup, save_backup
from demo.batches import TrainingBatches
from demo.digits import load_split
from demo.evaluate import evaluate_folder
from demo.graphed import StepRunner
from demo.learner import PROBE_WEIGHT, Probes
from demo.lessons import OTHER_PATHS_DROP, QUESTIONS_PER_PICTURE
from demo.prefetch import fetch_ahead
from demo.tokenizer import train_tokenizer

REPORT_EVERY = 200
BACKUP_EVERY_S = 40.0
WARM_UP_STEPS = 300


@dataclass(frozen=True)
class Plan:
    """What to train with; written into training.json as it is."""

    family: str
    steps: int
    limit_s: float
    pictures: int
    questions: int
    seed: int
    peak_rate: float
    weight_decay: float
    workers: int
    device: str
    reuse: bool


@dataclass(frozen=True)
class Files:
    """What is read and written; None where it is not wanted."""

    out: Path
    digits: Path | None
    backup: Path | None
    resume: Path | None


@dataclass(frozen=True)
class Outcome:
    """How training ended; the counts include the runs that it resumed."""

    steps: int
    seconds: float
    pictures: int
    last_loss: float


def main() -> None:
    """Train, save, evaluate, report."""
    arguments = vars(_parse_arguments())
    plan = Plan(weight_decay=0.05, **{key: arguments[key] for key in _names(Plan) - {"weight_decay"}})
    files = Files(**{key: arguments[key] for key in _names(Files)})
    outcome = train(plan, files)
    figures = evaluate_folder(files.out, arguments["evaluate"], plan.device, files.digits)
    write_report(files.out, plan, outcome, figures)


class Learner:
    """A model with its probes and optimiser."""

    def __init__(self, plan: Plan) -> None:
        torch.manual_seed(plan.seed)
        torch.set_float32_matmul_precision("high")
        self.architecture = ARCHITECTURES[plan.family]
        self.tokenizer = train_tokenizer(self.architecture.chat)
        # Neither model has dropout; eval() leaves out the calls that would do nothing.
        self.model: Any = self.architecture.build_model(self.tokenizer).to(plan.device).eval()
        probes = Probes(self.architecture.probed, self.architecture.width).to(plan.device)
        self.parameters: list[nn.Parameter] = [*self.model.parameters(), *probes.parameters()]
        self.optimizer = _optimizer(plan, self.parameters)
        weights = torch.tensor([1.0, PROBE_WEIGHT], device=plan.device)
        self._run = StepRunner(
            lambda batch: self.architecture.losses(self.model, probes, batch), weights, self.parameters
        )

    def step(self, batch: tuple[Tensor, ...], rate: float) -> Tensor:
        """Losses [answers, probes], on the device."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        losses = self._run(batch)
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        return losses

    def write_checkpoint(self, folder: Path) -> None:
        self.architecture.save_checkpoint(self.model, self.tokenizer, folder)


def train(plan: Plan, files: Files) -> Outcome:
    """Train from fresh weights, or from a backup, and write the checkpoint folder."""
    learner = Learner(plan)
    print(f"{sum(value.numel() for value in learner.model.parameters()):,} parameters on {plan.device}", flush=True)
    before = load_backup(files.resume, learner.parameters, learner.optimizer) if files.resume else Progress()
    progress, saved_s, last = before, time.monotonic(), torch.zeros(2)
    for reached, losses in _run_steps(plan, learner, _load(plan, learner, files.digits, before.steps), before):
        progress, last = reached, losses
        if files.backup and time.monotonic() - saved_s > BACKUP_EVERY_S:
            save_backup(files.backup, learner.write_checkpoint, learner.parameters, learner.optimizer, progress)
            saved_s = time.monotonic()
    learner.write_checkpoint(files.out)
    if files.backup:
        save_backup(files.backup, learner.write_checkpoint, learner.parameters, learner.optimizer, progress)
    return Outcome(**asdict(progress), last_loss=round(last[0].item(), 5))


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
        "plan": {**asdict(plan), "other_paths_dropped": OTHER_PATHS_DROP, "probe_weight": PROBE_WEIGHT},
        "outcome": asdict(outcome),
        "held_out": figures,
    }
    text = json.dumps(report, indent=2)
    (folder / "training.json").write_text(text + "\n")
    print(text, flush=True)


def _run_steps(
    plan: Plan, learner: Learner, batches: Iterator[tuple[Tensor, ...]], before: Progress
) -> Iterator[tuple[Progress, Tensor]]:
    """How far training is after each step, and that step's losses."""
    started, waited_s = time.monotonic(), 0.0
    asked = started
    for step, batch in enumerate(fetch_ahead(batches, plan.reuse), start=1):
        now = time.monotonic()
        waited_s += now - asked
        losses = learner.step(batch, learning_rate(plan, step - 1, now - started))
        elapsed_s = now - started
        if step % REPORT_EVERY == 0:
            answers, probed = losses.tolist()
            print(f"step {step}  answers {answers:.4f}  probes {probed:.4f}  {elapsed_s:.0f} s", end="  ")
            print(f"(waited {waited_s:.0f} s for batches)", flush=True)
        pictures = before.pictures + step * plan.pictures
        yield Progress(before.steps + step, round(before.seconds + elapsed_s, 1), pictures), losses
        if elapsed_s > plan.limit_s:
            break
        asked = time.monotonic()


def _optimizer(plan: Plan, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW with weight decay for matrices only."""
    groups = [
        {"params": [value for value in parameters if value.ndim >= 2], "weight_decay": plan.weight_decay},
        {"params": [value for value in parameters if value.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=plan.peak_rate, betas=(0.9, 0.98), fused=plan.device != "cpu")


def _load(plan: Plan, learner: Learner, digits: Path | None, first: int) -> Iterator[tuple[Tensor, ...]]:
    scans, tokenizer = load_split(digits).train, learner.tokenizer.to_str()
    batches = TrainingBatches(
        learner.architecture, scans, tokenizer, plan.pictures, plan.questions, plan.steps, plan.seed, first
    )
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


def _names(kind: type[Plan | Files]) -> set[str]:
    return {field.name for field in fields(kind)}


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", choices=ARCHITECTURES, default=DEFAULT.family)
    parser.add_argument("--out", type=Path, required=True, help="checkpoint folder to write")
    parser.add_argument("--digits", type=Path, help="file written by demo.digits; default: ask scikit-learn")
    parser.add_argument("--backup", type=Path, help="folder to save into every 40 seconds")
    parser.add_argument("--resume", type=Path, help="backup folder to go on from")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=9000)
    parser.add_argument("--limit-s", type=float, default=420.0, help="seconds of training at most")
    parser.add_argument("--pictures", type=int, default=128, help="pictures per step")
    parser.add_argument("--questions", type=int, default=QUESTIONS_PER_PICTURE, help="questions per picture")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--peak-rate", type=float, default=1.2e-3)
    parser.add_argument("--workers", type=int, default=max(0, (os.cpu_count() or 1) - 1))
    parser.add_argument("--reuse", action="store_true", help="train on recent batches again while no new one is ready")
    parser.add_argument("--evaluate", type=int, default=500, help="held-out pictures")
    return parser.parse_args()


if __name__ == "__main__":
    main()
