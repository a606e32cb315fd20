"""transformers' `generate`, what the server is compared with: a process that answers one case per line.

`python -m bench.reference CHECKPOINT DTYPE` reads a case per line from standard input, writes a record per line.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoTokenizer
from transformers.generation.streamers import BaseStreamer
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from bench.records import Case, Record

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
    """The whole model in one process, with transformers' own attention and cache."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._images: Any = cast(Any, AutoImageProcessor).from_pretrained(folder, backend="pil")
        self._model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        self._model.generation_config.eos_token_id = None
        self._image_token_id = int(self._model.config.image_token_id)

    @torch.inference_mode()
    def measure(self, case: Case) -> Record:
        """One request, from the picture's bytes to the end of the answer."""
        started_s = time.perf_counter()
        inputs = self._prepare(case)
        watch = Stopwatch()
        generated = self._model.generate(**inputs, max_new_tokens=case.max_tokens, do_sample=False, streamer=watch)
        input_tokens = inputs["input_ids"].shape[1]
        answer = generated[0, input_tokens:]
        text = self._tokenizer.decode(answer, skip_special_tokens=True)
        first_s, end_s = watch.times_s[1] - started_s, watch.times_s[-1] - started_s
        return Record(first_s, end_s, 1, len(answer), input_tokens, text)

    def _prepare(self, case: Case) -> dict[str, torch.Tensor]:
        parts: list[dict[str, str]] = [{"type": "image"}] if case.picture else []
        messages = [{"role": "user", "content": [*parts, {"type": "text", "text": case.question}]}]
        prompt = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        pixels: dict[str, torch.Tensor] = {}
        if case.picture:
            pixels = dict(self._images(images=[Image.open(case.picture).convert("RGB")], return_tensors="pt"))
            count = int(pixels["image_grid_thw"].prod()) // self._images.merge_size**2
            prompt = prompt.replace("<|image_pad|>", "<|image_pad|>" * count)
        tokens = self._tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
        ids = tokens["input_ids"]
        types = {"mm_token_type_ids": (ids == self._image_token_id).int()}
        return {"input_ids": ids, "attention_mask": tokens["attention_mask"], **types, **pixels}


def main() -> None:
    """Answer lines until standard input ends."""
    reference = Reference(Path(sys.argv[1]), sys.argv[2])
    print(READY, flush=True)
    for line in sys.stdin:
        print(json.dumps(asdict(reference.measure(Case(**json.loads(line))))), flush=True)


if __name__ == "__main__":
    main()
