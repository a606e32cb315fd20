"""`make demo`: start the embedded server, ask the checkpoint about a picture, stream the answer, stop.

python -m demo.run [--family NAME | --checkpoint DIR] [--picture FILE] [--question TEXT]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from deepstack_client import Client, ClientError
from deepstack_serving.embedded import EmbeddedServer, ProgressDisplay
from deepstack_serving.errors import DeepstackError
from deepstack_serving.repository import model_names
from demo.folders import CHECKPOINTS, DEFAULT_FAMILY

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "demo" / "pictures"


def ask(client: Client, picture: Path, question: str) -> str:
    """Stream one answer to standard output, then its speed. Returns the text."""
    started_s = time.monotonic()
    first_s = 0.0
    with client.stream(question, images=[picture], max_tokens=64, temperature=0.0) as stream:
        for chunk in stream:
            first_s = first_s or time.monotonic() - started_s
            print(chunk.text, end="", flush=True)
    completion = stream.completion()
    rest_s = time.monotonic() - started_s - first_s
    speed = ((completion.num_output_tokens or 1) - 1) / max(rest_s, 1e-9)
    print(f"\n  time to first token {first_s * 1000:.0f} ms, then {speed:.0f} tokens per second\n")
    return completion.text


def expected_answers(picture: Path) -> dict[str, str]:
    """Question -> right answer, for the pictures that come with the project."""
    truth = json.loads((PICTURES / "truth.json").read_text())
    return {item["question"]: item["answer"] for item in truth.get(picture.name, {}).get("questions", [])}


def run(checkpoint: Path, picture: Path, questions: dict[str, str]) -> bool:
    """Whether every answer that is known was given."""
    models = ROOT / "model_repository"
    with EmbeddedServer(models, model_names(), {"DEEPSTACK_CHECKPOINT": str(checkpoint.absolute())}) as server:
        with ProgressDisplay(sys.stdout) as display:
            server.wait_until_ready(probe=lambda: server.ask("Hello"), listener=display.show)
        print(f"picture: {picture}")
        right = True
        with Client(f"grpc://{server.grpc_address}") as client:
            for question, answer in questions.items():
                print(f"question: {question}\nanswer: ", end="")
                right &= ask(client, picture, question).strip() == answer or not answer
        print("stopping the server")
    return right


def main() -> int:
    """Exit code 0 when the answers are right, or their truth is not known."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--family", choices=CHECKPOINTS, default=DEFAULT_FAMILY, help="which demo checkpoint")
    which.add_argument("--checkpoint", type=Path, help="a checkpoint of your own")
    parser.add_argument("--picture", type=Path, default=PICTURES / "example_1.png")
    parser.add_argument("--question", help="default: the questions whose answers are known")
    arguments = parser.parse_args()
    questions = {arguments.question: ""} if arguments.question else expected_answers(arguments.picture)
    try:
        checkpoint = arguments.checkpoint or CHECKPOINTS[arguments.family]
        right = run(checkpoint, arguments.picture, questions or {"What is the number?": ""})
    except (DeepstackError, ClientError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if not right:
        print("error: an answer is not the one in truth.json", file=sys.stderr)
    return 0 if right else 1


if __name__ == "__main__":
    raise SystemExit(main())
