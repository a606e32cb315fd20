"""transformers' `generate`, what the server is compared with: a process that answers one case per line.

`python -m bench.reference CHECKPOINT DTYPE` reads a case per line from standard input, writes a record per line.
"""

from __future__ import annotations

import inspect
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoTokenizer
from transformers.generation.streamers import BaseStreamer

from bench.records import Case, Record
from deepstack_serving.checkpoint import open_config

READY = "ready"


class Stopwatch(BaseStreamer):  # type: ignore[misc]
    """Notes when each token was there; the first `put` is the prompt."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def put(self, value: Any) -> None:
        self.times_s.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is held back."""


class Reference:
    """The whole model in one process, with transformers' own attention and cache.

    `options` are further arguments of `generate`.
    """

    def __init__(self, folder: Path, dtype: str, device: str = "cpu", **options: Any) -> None:
        checkpoint = open_config(folder)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._images = checkpoint.family.image_processing(folder)  # transformers' own processor, its PIL backend
        model: Any = AutoModelForImageTextToText.from_pretrained(
            folder, dtype=getattr(torch, dtype), device_map={"": device} if device != "cpu" else None
        )
        self.model: Any = model.eval()
        self.model.generation_config.eos_token_id = None
        self.device = device
        self._options = options
        self._image_token_id = checkpoint.family.image_token_id(checkpoint.config)

    def measure(self, case: Case) -> Record:
        """One request, from the picture's bytes to the end of the answer."""
        started_s = time.perf_counter()
        return self.answer(self.prepare(case), case.max_tokens, started_s)

    @torch.inference_mode()
    def answer(self, inputs: dict[str, torch.Tensor], max_tokens: int, started_s: float) -> Record:
        """A prepared request, timed from `started_s` on."""
        watch = Stopwatch()
        generated = self.model.generate(
            **inputs, max_new_tokens=max_tokens, do_sample=False, streamer=watch, **self._options
        )
        input_tokens = inputs["input_ids"].shape[1]
        answer = generated[0, input_tokens:]
        text = self.tokenizer.decode(answer, skip_special_tokens=True)
        first_s, end_s = watch.times_s[1] - started_s, watch.times_s[-1] - started_s
        return Record(first_s, end_s, 1, len(answer), input_tokens, text)

    def prepare(self, case: Case) -> dict[str, torch.Tensor]:
        """What the model takes, on its device: tokens with the chat template around them, pixels and their grid."""
        parts: list[dict[str, str]] = [{"type": "image"}] if case.picture else []
        messages = [{"role": "user", "content": [*parts, {"type": "text", "text": case.question}]}]
        prompt = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        pixels: dict[str, torch.Tensor] = {}
        if case.picture:
            pixels = self._images.prepare([Image.open(case.picture).convert("RGB")])
            (count,) = self._images.token_counts(pixels)
            placeholder = self.tokenizer.convert_ids_to_tokens(self._image_token_id)
            prompt = prompt.replace(placeholder, placeholder * count)
        tokens = self.tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
        ids = tokens["input_ids"]
        types = {"mm_token_type_ids": (ids == self._image_token_id).int()}
        inputs = {"input_ids": ids, "attention_mask": tokens["attention_mask"], **types, **pixels}
        taken = inspect.signature(self.model.forward).parameters
        return {name: value.to(self.device) for name, value in inputs.items() if name in taken}


def main() -> None:
    """Answer lines until standard input ends."""
    reference = Reference(Path(sys.argv[1]), sys.argv[2])
    print(READY, flush=True)
    for line in sys.stdin:
        print(json.dumps(asdict(reference.measure(Case(**json.loads(line))))), flush=True)


if __name__ == "__main__":
    main()
