"""Where the time of one image goes in the vision encoder: `python -m bench.vision_encoder --folder FOLDER`.

The tower has the shape of Qwen3-VL-8B's and random weights, written to FOLDER once (1.3 GB). Every arm runs the same
stage in this process; the parts of a run are then timed alone, so they need not add up to it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from bench.checkpoint import SEED, build_tokenizer, config_values, write_json
from bench.figures import MILLISECONDS, markdown_table, median
from bench.machine import command_line, describe
from bench.pictures import pictures
from bench.serving import say
from deepstack_serving.checkpoint import open_checkpoint
from deepstack_serving.media import MediaFiles, decode
from deepstack_serving.settings import parse_settings
from deepstack_serving.stages.limits import image_limits
from deepstack_serving.stages.vision import VisionStage

WARM_UP, REPEATS = 4, 15
PARTS = ("decode", "fit", "assemble", "tower", "one image", "one of two threads", "images/s")
_WIDTH = 4096  # of the language model


@dataclass(frozen=True)
class Arm:
    """How the stage runs."""

    execution: str
    compile_mode: str

    @property
    def name(self) -> str:
        return f"{self.execution}, {'plain' if self.compile_mode == 'off' else self.compile_mode}"


def arms(device: str, autotune: bool) -> Iterator[Arm]:
    """On a CPU there is one way."""
    if device == "cpu":
        yield Arm("eager", "off")
        return
    for compile_mode in ("off", "layers", *(["autotune"] if autotune else [])):
        for execution in ("eager", "graph"):
            yield Arm(execution, compile_mode)


def vision_values(depth: int) -> dict[str, Any]:
    """The 8B model's; a tower with fewer blocks keeps its last ones out."""
    return {
        "depth": depth,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_heads": 16,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": _WIDTH,
        "num_position_embeddings": 48 * 48,
        "deepstack_visual_indexes": [index for index in (8, 16, 24) if index < depth] or [0],
    }


def ensure_tower(folder: Path, depth: int, device: str) -> Path:
    """A checkpoint whose language model is as small as its width allows; written unless it is there."""
    wanted = json.dumps(vision_values(depth))
    mark = folder / "complete"
    if mark.exists() and mark.read_text() == wanted:
        return folder
    say(f"writing a random tower of {depth} blocks to {folder} ...")
    folder.mkdir(parents=True, exist_ok=True)
    values = config_values(build_tokenizer(1024), layers=3, width=_WIDTH)
    values["text_config"] |= {"intermediate_size": 64, "num_attention_heads": 1, "num_key_value_heads": 1}
    values["vision_config"] = vision_values(depth)
    torch.manual_seed(SEED)
    with torch.device(device):
        model: Any = Qwen3VLForConditionalGeneration(Qwen3VLConfig(**values))
    model.to(torch.bfloat16).save_pretrained(folder)
    pixels = {
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    size = {"shortest_edge": 65_536, "longest_edge": 16_777_216}
    write_json(
        folder / "preprocessor_config.json",
        {"image_processor_type": "Qwen2VLImageProcessorFast", **pixels, "size": size},
    )
    mark.write_text(wanted)
    return folder


def timed(call: Callable[[], object], device: str, repeats: int = REPEATS) -> float:
    """Median milliseconds, what the device does among them."""
    times = []
    for number in range(WARM_UP + repeats):
        started_s = time.perf_counter()
        call()
        if device != "cpu":
            torch.cuda.synchronize(device)
        if number >= WARM_UP:
            times.append(time.perf_counter() - started_s)
    return median(times) * MILLISECONDS


@torch.inference_mode()
def measure(stage: VisionStage, file: bytes, repeats: int) -> dict[str, float]:
    """Milliseconds of the parts, and images a second of two threads."""
    inside, limits, device = cast(Any, stage), image_limits(cast(Any, stage)._settings), stage.device
    picture = decode(file, limits)
    fitted = inside._processing.fit(picture)
    inputs = inside._processing.assemble([fitted], device, inside._dtype)
    run = stage.runner.run if stage.runner else lambda given: inside._family.encode(inside._model, given)

    def one_image() -> object:
        return stage.run(MediaFiles((file,)), ["image_embeds"])

    whole_ms = timed(one_image, device, repeats)
    with ThreadPoolExecutor(2) as pool:
        together_ms = timed(lambda: list(pool.map(lambda _: one_image(), range(8))), device, max(repeats // 5, 1))
    values = (
        timed(lambda: decode(file, limits), device, repeats),
        timed(lambda: inside._processing.fit(picture), device, repeats),
        timed(lambda: inside._processing.assemble([fitted], device, inside._dtype), device, repeats),
        timed(lambda: run(inputs), device, repeats),
        whole_ms,
        together_ms / 4,
        8 * MILLISECONDS / together_ms,
    )
    return dict(zip(PARTS, values, strict=True))


def run_arm(folder: Path, arm: Arm, device: str, file: bytes, repeats: int) -> dict[str, Any]:
    """Load the stage, measure, and let it go."""
    settings = parse_settings(
        {
            "checkpoint": str(folder),
            "device": device,
            "execution": arm.execution,
            "compile": arm.compile_mode,
            "vision_cache_bytes": "0",
        }
    )
    started_s = time.perf_counter()
    stage = VisionStage(settings, open_checkpoint(folder))
    load_s = time.perf_counter() - started_s
    say(f"{arm.name}: loaded in {load_s:.1f} s")
    result: dict[str, Any] = {"load_s": load_s, **measure(stage, file, repeats)}
    if device != "cpu":
        result["memory_mib"] = torch.cuda.max_memory_reserved(device) / 2**20
        torch.cuda.reset_peak_memory_stats(device)
    stage.close()
    return result


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """One line for each arm."""
    header = ["arm", *(name if "/s" in name else f"{name} ms" for name in PARTS), "load s"]
    return markdown_table(
        header,
        [[name, *(round(item[part], 2) for part in PARTS), round(item["load_s"], 1)] for name, item in results.items()],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="where the random checkpoint is kept")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--depth", type=int, default=27, help="blocks of the tower")
    parser.add_argument("--side", type=int, default=1024, help="pixels of each side of the picture, a JPEG")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--autotune", action="store_true", help="measure compile = autotune too")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    folder = ensure_tower(options.folder, options.depth, options.device)
    [file] = pictures(1, SEED, ((options.side, options.side),))
    results: dict[str, Any] = {}
    for arm in arms(options.device, options.autotune):
        results[arm.name] = run_arm(folder, arm, options.device, file, options.repeats)
        if options.json:
            content = {**describe(command_line("bench.vision_encoder")), "file_bytes": len(file), "results": results}
            write_json(options.json, content)
    print(table(results))


if __name__ == "__main__":
    main()
