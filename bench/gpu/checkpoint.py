"""Complete checkpoints of real shapes with random weights: `python -m bench.gpu.checkpoint SHAPE FOLDER`.

The tokenizer covers the whole vocabulary: a token whose text is empty gives no response of its own, so with a smaller
one the time to the first token could not be seen.
"""

from __future__ import annotations

import argparse
import copy
import json
import lzma
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoConfig

from bench.checkpoint import build_tokenizer, write_json
from bench.failures import BenchError
from bench.gpu.arms import emit
from bench.gpu.shapes import SHAPES, Shape, shape
from bench.gpu.weights import Shapes, weight_shapes, write_weights
from bench.serving import PROJECT

COMPLETE = "complete"
_SPARE_BYTES = 1 << 30


def ensure_checkpoint(wanted: Shape, folder: Path, tokenizer_folder: Path | None, device: str) -> dict[str, Any]:
    """Write it unless it is there and whole; what was written, for the record."""
    if (folder / COMPLETE).exists():
        return {"written": False, **json.loads((folder / COMPLETE).read_text())}
    folder.mkdir(parents=True, exist_ok=True)
    started_s = time.perf_counter()
    tokenizer = _tokenizer(wanted, tokenizer_folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_config(wanted, tokenizer, folder)
    shapes = weight_shapes(AutoConfig.from_pretrained(folder))
    _check_space(folder, shapes)
    total = write_weights(folder, shapes, device)
    facts = {
        "bytes": total,
        "parameters": total // 2,
        "tokenizer": "given" if tokenizer_folder else "made up",
        "write_s": round(time.perf_counter() - started_s, 2),
    }
    (folder / COMPLETE).write_text(json.dumps(facts))
    return {"written": True, **facts}


def write_config(wanted: Shape, tokenizer: Tokenizer, folder: Path) -> None:
    """Everything of a checkpoint folder but tokenizer.json and weights."""
    form, demo = wanted.form, PROJECT / "demo" / "checkpoints" / wanted.form.template
    config = copy.deepcopy(dict(wanted.config))
    config |= {key: tokenizer.token_to_id(token) for key, token in form.config_ids.items()}
    config["dtype"] = "bfloat16"
    write_json(folder / "config.json", config)
    end, padding = (tokenizer.token_to_id(token) for token in (form.end, form.padding))
    write_json(folder / "generation_config.json", {"do_sample": False, "eos_token_id": [end], "pad_token_id": padding})
    settings = json.loads((demo / "tokenizer_config.json").read_text())
    write_json(folder / "tokenizer_config.json", {**settings, "model_max_length": 262_144})
    shutil.copy(demo / "chat_template.jinja", folder)
    for path in demo.glob("*processor_config.json"):
        write_json(folder / path.name, _processor_values(json.loads(path.read_text()), config))


def _processor_values(values: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """The demo's values with those that follow from the model's config, and the hub's limits of pixels."""
    vision = config["vision_config"]
    changed: dict[str, Any] = {"patch_size": vision["patch_size"]}
    if "image_grid_pinpoints" in values:
        side = {"height": vision["image_size"], "width": vision["image_size"]}
        changed |= {"image_grid_pinpoints": config["image_grid_pinpoints"], "size": side, "crop_size": side}
    elif "merge_size" in values:
        limits = {"shortest_edge": 256 * 256, "longest_edge": 4096 * 4096}
        video_limits = {"shortest_edge": 4096, "longest_edge": 24 * 1024 * 1024}
        changed["size"] = video_limits if "video_processor_type" in values else limits
    return {key: changed.get(key, value) for key, value in values.items()}


def _tokenizer(wanted: Shape, folder: Path | None) -> Tokenizer:
    if folder is None:
        return build_tokenizer(wanted.vocabulary, wanted.form.special)
    plain, packed = folder / "tokenizer.json", folder / "tokenizer.json.xz"
    if not (plain.is_file() or packed.is_file()):
        raise BenchError(f"{folder} holds neither {plain.name} nor {packed.name}")
    content = plain.read_text() if plain.is_file() else lzma.decompress(packed.read_bytes()).decode()
    tokenizer = Tokenizer.from_str(content)
    missing = [token for token in wanted.form.config_ids.values() if tokenizer.token_to_id(token) is None]
    if missing:
        raise BenchError(f"the tokenizer in {folder} has no {', '.join(missing)}, which {wanted.title} needs")
    return tokenizer


def _check_space(folder: Path, shapes: Shapes) -> None:
    wanted = sum(torch.Size(value).numel() * 2 for value in shapes.values()) + _SPARE_BYTES
    free = shutil.disk_usage(folder).free
    if free < wanted:
        raise BenchError(f"{folder} has {free / 1e9:.1f} GB free, but the checkpoint takes {wanted / 1e9:.1f} GB")


def main() -> None:
    """Writes the record to standard output."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="holds tokenizer.json or tokenizer.json.xz")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    facts = ensure_checkpoint(shape(arguments.shape), arguments.folder, arguments.tokenizer, arguments.device)
    emit("checkpoint", facts)


if __name__ == "__main__":
    main()
