"""Writes the three example pictures under demo/pictures/, drawn from held-out digits, and their truth.

python -m demo.examples
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from demo.digits import load_split
from demo.ink import PLAIN
from demo.pictures import compose
from demo.questions import Kind, answer

FOLDER = Path(__file__).with_name("pictures")
QUESTIONS = {
    Kind.READ: "What is the number?",
    Kind.PLACE: "Where is the mark?",
    Kind.BOTH: "Describe the picture.",
}
EXAMPLES = (("example_1.png", 16, (272, 128)), ("example_2.png", 6, (240, 112)), ("example_3.jpg", 10, (283, 121)))
"""File name, seed, size in pixels."""
CLEAN = replace(PLAIN, paper_noise=0)
"""Without grain a file is a few kilobytes."""


def write_examples(folder: Path) -> dict[str, Any]:
    """The truth, as it is written to truth.json beside the pictures."""
    truths: dict[str, Any] = {}
    for name, seed, size in EXAMPLES:
        picture, truth = compose(np.random.default_rng(seed), load_split().held_out, CLEAN, size)
        picture.save(folder / name, quality=92)
        asked = [{"question": text, "answer": answer(kind, truth)} for kind, text in QUESTIONS.items()]
        truths[name] = {**asdict(truth), "questions": asked}
    (folder / "truth.json").write_text(json.dumps(truths, indent=2) + "\n")
    return truths


if __name__ == "__main__":
    print(json.dumps(write_examples(FOLDER), indent=2))
