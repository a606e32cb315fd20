"""What `deepstack serve` prints once it is ready: commands to try, each of which works as it is pasted."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from pathlib import Path

from deepstack_serving.wire import ORCHESTRATOR


def commands_to_paste(http_address: str, grpc_address: str, image: str, question: str, perf_analyzer: str) -> str:
    """Commands that a user can paste into another terminal with this working folder while the server runs.

    The load generator's is left out where there is none.
    """
    endpoint = f"http://{http_address}/v2/models/{ORCHESTRATOR}"
    chat = f"{_chat_program()} chat {shlex.quote(image)} -p {shlex.quote(question)} --address grpc://{grpc_address}"
    whole, stream = (request_body_command(image, question, stream=stream) for stream in (False, True))
    commands = [
        chat,
        f"{whole} | curl -s {endpoint}/generate -d @-",
        f"{stream} | curl -sN {endpoint}/generate_stream -d @-",
    ]
    program = shutil.which(perf_analyzer)
    if program:
        commands.append(
            f"load=$(mktemp) && {_load_command(image, question)} > $load && {shlex.quote(program)} -m {ORCHESTRATOR} "
            f"-u {grpc_address} -i grpc --streaming --async --input-data $load --request-count 64 "
            "--concurrency-range 4"
        )
    return "\n\n".join(commands)


def request_body_command(image: str, question: str, *, stream: bool = False) -> str:
    """A shell command that prints a JSON request."""
    sampling = json.dumps({"max_tokens": 64})
    streaming = {"stream": True} if stream else {}
    return _json_command({"text_input": question, **streaming, "sampling_parameters": sampling, "image": [""]}, image)


def _load_command(image: str, question: str) -> str:
    sampling = json.dumps({"max_tokens": 32})
    request = {"text_input": [question], "stream": [True], "sampling_parameters": [sampling]}
    return _json_command({"data": [{**request, "image": {"content": [""], "shape": [1]}}]}, image)


def _json_command(content: object, image: str) -> str:
    """Prints JSON with the picture in its last empty text. It is piped: as an argument it would soon be too long."""
    before, _, after = json.dumps(content).rpartition('""')
    texts = [f"printf '%s' {shlex.quote(text)}" for text in (f'{before}"', f'"{after}')]
    return f"({texts[0]}; base64 -w0 {shlex.quote(image)}; {texts[1]})"


def _chat_program() -> str:
    """The command of this environment, by its path unless the shell finds the same by its name."""
    program = Path(sys.executable).with_name("deepstack")
    found = shutil.which(program.name)
    if found and program.exists() and Path(found).samefile(program):
        return program.name
    here = Path.cwd()
    return shlex.quote(str(program.relative_to(here) if program.is_relative_to(here) else program))
