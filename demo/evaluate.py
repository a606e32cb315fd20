"""Held-out cases and how well a checkpoint answers them: `python -m demo.evaluate [FOLDER]`.

`held_out_cases` is what a server is measured with too: PNG bytes, question, expected answer. The offline evaluation
here runs transformers' `generate` greedily, once as it is and once with the features under test zeroed where they enter
the language model; the second is the control that shows that reading depends on them.
"""

from __future__ import annotations

import argparse
import io
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoTokenizer

# The one under transformers' top level asks for torchvision in some versions; this one is content with PIL.
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from demo.architectures import DEFAULT, architecture_of
from demo.digits import Scans, load_split
from demo.pictures import Truth, compose
from demo.questions import Kind, answer, choose_question

EVALUATION_SEED = 90_001
MAX_NEW_TOKENS = 40


@dataclass(frozen=True)
class Case:
    """One question about one held-out picture. The answer has to be equal to `answer`, character by character."""

    image_png: bytes
    question: str
    answer: str
    kind: Kind
    truth: Truth


def held_out_cases(
    pictures: int, kinds: Sequence[Kind] = tuple(Kind), seed: int = EVALUATION_SEED, scans: Scans | None = None
) -> Iterator[Case]:
    """Each picture once per kind. Picture i depends on (seed, i) alone, so fewer pictures are a prefix of more."""
    scans = scans or load_split().held_out
    for index in range(pictures):
        random = np.random.default_rng([seed, index])
        picture, truth = compose(random, scans)
        encoded = io.BytesIO()
        picture.save(encoded, "PNG")
        questions = {kind: choose_question(random, kind) for kind in Kind}
        for kind in kinds:
            yield Case(encoded.getvalue(), questions[kind], answer(kind, truth), kind, truth)


def score(cases: Iterable[Case], answers: Iterable[str]) -> dict[str, float]:
    """Share of exactly right answers, per kind."""
    right: dict[str, list[bool]] = defaultdict(list)
    for case, text in zip(cases, answers, strict=True):
        right[case.kind.value].append(text.strip() == case.answer)
    return {kind: round(sum(results) / len(results), 4) for kind, results in right.items()}


class OfflineReader:
    """Answers cases with transformers, in batches."""

    def __init__(self, folder: Path, device: str = "cpu", dtype: torch.dtype | str = "auto") -> None:
        self.architecture = architecture_of(folder)
        model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype)
        self.model: Any = model.to(device).eval()
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        images: Any = AutoImageProcessor
        self._images: Any = images.from_pretrained(folder, backend="pil")

    @torch.inference_mode()
    def answer(self, cases: Sequence[Case]) -> list[str]:
        """One batch."""
        inputs = self.prepare(cases)
        generated = self.model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS)
        replies = generated[:, inputs["input_ids"].shape[1] :]
        texts: list[str] = self._tokenizer.batch_decode(replies, skip_special_tokens=True)
        return texts

    def prepare(self, cases: Sequence[Case]) -> dict[str, torch.Tensor]:
        """What the model's forward takes: padded tokens, pixels and what belongs to them."""
        pictures = [Image.open(io.BytesIO(case.image_png)) for case in cases]
        pixels = self._images(images=pictures, return_tensors="pt")
        chat = self.architecture.chat
        prompts = [
            chat.prompt(chat.image_part.replace(chat.image_token, chat.image_token * count) + case.question)
            for count, case in zip(self.architecture.token_counts(pixels), cases, strict=True)
        ]
        tokens = self._tokenizer(prompts, padding=True, return_tensors="pt")
        inputs = {**pixels, "input_ids": tokens["input_ids"], "attention_mask": tokens["attention_mask"]}
        inputs |= self.architecture.generation_inputs(self.model, inputs["input_ids"])
        return {name: value.to(self.model.device) for name, value in inputs.items()}


def answer_all(answer_batch: Callable[[Sequence[Case]], list[str]], cases: Sequence[Case], batch: int) -> list[str]:
    """All answers, in order."""
    texts: list[str] = []
    for start in range(0, len(cases), batch):
        texts += answer_batch(cases[start : start + batch])
    return texts


def evaluate_folder(folder: Path, pictures: int, device: str = "cpu", digits: Path | None = None) -> dict[str, Any]:
    """Figures for the stored dtype, for fp32, and for the control with zeroed features (in the stored dtype)."""
    cases = list(held_out_cases(pictures, scans=load_split(digits).held_out))
    batch = 32 if device == "cpu" else 250
    figures: dict[str, Any] = {"pictures": pictures, "seed": EVALUATION_SEED}
    for name, dtype, zeroed in (
        ("bfloat16", torch.bfloat16, False),
        ("float32", torch.float32, False),
        ("bfloat16_zeroed_deepstack", torch.bfloat16, True),
    ):
        reader = OfflineReader(folder, device, dtype)
        with reader.architecture.zeroed_features(reader.model) if zeroed else nullcontext():
            figures[name] = score(cases, answer_all(reader.answer, cases, batch))
        print(name, figures[name], flush=True)
    return figures


def main() -> None:
    """Print the figures of one checkpoint folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=DEFAULT.checkpoint)
    parser.add_argument("--pictures", type=int, default=500)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--digits", type=Path, help="file written by demo.digits; default: ask scikit-learn")
    arguments = parser.parse_args()
    print(
        json.dumps(evaluate_folder(arguments.folder, arguments.pictures, arguments.device, arguments.digits), indent=2)
    )


if __name__ == "__main__":
    main()
