"""`make evaluate`: score the demo checkpoint on held-out digits through the running server, with a zeroed control.

    python -m bench.evaluate [--checkpoint DIR] [--pictures N] [--output DIR]

Every case goes over gRPC, many at a time. The control serves a copy of the checkpoint whose deepstack features are zero
(demo/control.py): what is lost there is what the features carry.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.machine import command_line, describe
from bench.options import add_output
from bench.serving import DEMO_CHECKPOINT, embedded_server, say
from deepstack_client import AsyncClient
from demo.control import zeroed_copy
from demo.evaluate import MAX_NEW_TOKENS, Case, held_out_cases, score

CONCURRENCY = 32


def main() -> None:
    """Print the scores and write them to a file."""
    arguments = _parse()
    cases = list(held_out_cases(arguments.pictures))
    figures: dict[str, Any] = {"pictures": arguments.pictures, "cases": len(cases)}
    figures["served"] = _served_score(arguments.checkpoint, cases)
    with tempfile.TemporaryDirectory(prefix="deepstack-control-") as folder:
        control = zeroed_copy(arguments.checkpoint, Path(folder) / "checkpoint")
        figures["served_with_zeroed_deepstack"] = _served_score(control, cases)
    figures["machine"] = describe(command_line("bench.evaluate"))
    print(json.dumps(figures, indent=2))
    name = f"{datetime.date.today()}-evaluation-{arguments.checkpoint.name}.json"
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / name).write_text(json.dumps(figures, indent=2) + "\n")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Score the demo checkpoint through the running server")
    parser.add_argument("--checkpoint", type=Path, default=DEMO_CHECKPOINT)
    parser.add_argument("--pictures", type=int, default=500)
    add_output(parser)
    return parser.parse_args()


def _served_score(checkpoint: Path, cases: Sequence[Case]) -> dict[str, float]:
    with embedded_server(checkpoint) as server:
        answers = asyncio.run(_answers(server.grpc_address, cases))
    figures = score(cases, answers)
    say(f"{checkpoint.name}: {figures}")
    return figures


async def _answers(address: str, cases: Sequence[Case]) -> list[str]:
    limit = asyncio.Semaphore(CONCURRENCY)

    async with AsyncClient(f"grpc://{address}") as client:

        async def answer(case: Case) -> str:
            async with limit:
                completion = await client.generate(
                    case.question, images=[case.image_png], max_tokens=MAX_NEW_TOKENS, temperature=0.0
                )
            return completion.text

        return await asyncio.gather(*map(answer, cases))


if __name__ == "__main__":
    main()
