"""`deepstack serve` with four throw-away models: from the command line to a clean end."""

from __future__ import annotations

import argparse
import base64
import json
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepstack_serving import serve
from deepstack_serving.example_commands import commands_to_paste, request_body_command
from deepstack_serving.repository import TWO_STAGES, model_names, stage_names
from deepstack_serving.wire import ORCHESTRATOR

CONFIG = """
backend: "python"
max_batch_size: 0
model_transaction_policy { decoupled: true }
input [ { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] } ]
instance_group [ { kind: KIND_CPU count: 1 } ]
parameters { key: "language_stages" value { string_value: "language_early,language_late" } }
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
from deepstack_serving.example_commands import commands_to_paste, request_body_command
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
    for model in model_names():
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


def test_repository_of_another_number_of_stages_is_served(words: list[str], tmp_path: Path) -> None:
    """Only the repository says which models there are."""
    repository, single = tmp_path / "repository", model_names(stage_names(1))
    for model in model_names(TWO_STAGES):
        if model not in single:
            shutil.rmtree(repository / model)
    shutil.copytree(repository / single[0], repository / single[1])
    config = repository / ORCHESTRATOR / "config.pbtxt"
    config.write_text(config.read_text().replace(",".join(TWO_STAGES), single[1]))
    command = [sys.executable, "-c", COMMAND, *words, "--until-ready-only"]
    assert "ready: HTTP" in subprocess.run(command, capture_output=True, check=True, text=True).stdout


def test_device_for_a_model_that_is_not_there_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*words, "--setting", "devices=language_0=cpu"]) == 1
    assert "names language_0, which the model repository does not have" in capsys.readouterr().err


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


def test_failed_start_names_the_log(words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "repository" / ORCHESTRATOR / "1" / "model.py").write_text("raise ValueError('broken')")
    assert run(words) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: model 'orchestrator' did not load")
    assert str(tmp_path / "run" / "tritonserver.log") in error.splitlines()[-1]


@pytest.mark.parametrize("is_on_path", [False, True])
def test_chat_command_is_printed_as_it_can_be_called(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_on_path: bool
) -> None:
    program = tmp_path / "my environment" / "deepstack"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program.with_name("python")))
    monkeypatch.setenv("PATH", str(program.parent) if is_on_path else "")
    printed = commands_to_paste("h:1", "h:2", "p.png", "q", "")
    assert shlex.split(printed)[0] == ("deepstack" if is_on_path else str(program))


def test_streams_are_asked_for_and_load_comes_with_its_picture(tmp_path: Path) -> None:
    """The commands run in a shell whose curl shows its input and whose load generator shows its input file."""
    picture = tmp_path / "picture.png"
    picture.write_bytes(b"pixels")
    generator = tmp_path / "perf analyzer"
    generator.write_text('#!/bin/sh\nwhile [ "$1" != --input-data ]; do shift; done\ncat "$2"\n')
    generator.chmod(0o755)
    commands = commands_to_paste("h:1", "h:2", str(picture), 'what\'s ""?', str(generator)).split("\n\n")
    whole, stream, load = (json.loads(shell(f"curl() {{ cat; }}; {command}")) for command in commands[1:])
    assert [body.get("stream", False) for body in (whole, stream)] == [False, True]
    (request,) = load["data"]
    assert (request["stream"], request["text_input"], request["image"]["shape"]) == ([True], ['what\'s ""?'], [1])
    assert base64.b64decode(request["image"]["content"][0]) == b"pixels"


def test_load_generator_that_is_not_there_is_not_printed(tmp_path: Path) -> None:
    assert "concurrency" not in commands_to_paste("h:1", "h:2", "p.png", "q", str(tmp_path / "absent"))


def shell(command: str) -> bytes:
    return subprocess.run(["bash", "-c", command], capture_output=True, check=True).stdout


def test_printed_request_is_the_json_of_picture_and_question(tmp_path: Path) -> None:
    picture, question = tmp_path / "my picture's.png", 'What\'s "it"? 100 % \\ sure <image>'
    picture.write_bytes(bytes(range(256)) * 1000)
    body = json.loads(shell(request_body_command(str(picture), question)))
    assert base64.b64decode(body["image"][0]) == picture.read_bytes()
    assert (body["text_input"], json.loads(body["sampling_parameters"])) == (question, {"max_tokens": 64})
