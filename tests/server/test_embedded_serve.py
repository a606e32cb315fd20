"""`deepstack serve` with four throw-away models: from the command line to a clean end."""

from __future__ import annotations

import argparse
import base64
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepstack_serving import serve

CONFIG = """
backend: "python"
max_batch_size: 0
model_transaction_policy { decoupled: true }
input [ { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] } ]
instance_group [ { kind: KIND_CPU count: 1 } ]
"""
ECHO = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()
            response = pb_utils.InferenceResponse([pb_utils.Tensor("text_output", text)])
            request.get_response_sender().send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
COMMAND = """
import argparse, sys
from deepstack_serving import serve
parser = argparse.ArgumentParser()
serve.register(parser.add_subparsers())
arguments = parser.parse_args()
sys.exit(arguments.run(arguments))
"""


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """A complete command line for a checkpoint folder and a repository of echoing models."""
    checkpoint, repository = tmp_path / "checkpoint", tmp_path / "repository"
    checkpoint.mkdir()
    checkpoint.joinpath("config.json").write_text("{}")
    for model in serve.MODELS:
        version = repository / model / "1"
        version.mkdir(parents=True)
        version.joinpath("model.py").write_text(ECHO)
        version.parent.joinpath("config.pbtxt").write_text(CONFIG)
    ports = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0", "--run-directory", str(tmp_path / "run")]
    return ["serve", "--checkpoint", str(checkpoint), "--model-repository", str(repository), *ports]


@pytest.fixture
def command(words: list[str]) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", COMMAND, *words], stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def run(words: list[str]) -> int:
    parser = argparse.ArgumentParser()
    serve.register(parser.add_subparsers())
    arguments = parser.parse_args(words)
    code: int = arguments.run(arguments)
    return code


def lines_until(process: subprocess.Popen[str], start: str) -> list[str]:
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith(start):
            break
    return lines


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_a_ready_server_with_exit_code_0(command: subprocess.Popen[str], number: signal.Signals) -> None:
    lines = lines_until(command, "ready: ")
    command.send_signal(number)
    rest, _ = command.communicate(timeout=60)
    assert lines[-1].startswith("ready: HTTP 127.0.0.1:")
    assert (command.returncode, rest.splitlines()[-1]) == (0, "stopped")


def test_bad_setting_is_refused_in_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*words, "--setting", "no_such_key=1"]) == 1
    output = capsys.readouterr()
    assert output.err.startswith("error: ")
    assert output.err.count("\n") == 1
    assert "no_such_key" in output.err


def test_missing_repository_is_refused(words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run([*words, "--model-repository", str(tmp_path / "absent")]) == 1
    assert "--model-repository" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["--http-port=65536", "--http-port=x", "--setting=novalue"])
def test_ill_formed_options_are_wrong_usage(words: list[str], word: str) -> None:
    with pytest.raises(SystemExit) as caught:
        run([*words, word])
    assert caught.value.code == 2


def test_printed_request_is_the_json_of_picture_and_question(tmp_path: Path) -> None:
    picture, question = tmp_path / "my picture's.png", 'What\'s "it"? 100 % \\ sure <image>'
    picture.write_bytes(bytes(range(256)) * 1000)
    printed = subprocess.run(
        ["bash", "-c", serve.request_body_command(str(picture), question)], capture_output=True, check=True
    ).stdout
    body = json.loads(printed)
    assert base64.b64decode(body["image"][0]) == picture.read_bytes()
    assert (body["text_input"], json.loads(body["sampling_parameters"])) == (question, {"max_tokens": 64})
