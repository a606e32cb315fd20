"""The command `deepstack`: what it prints, its exit codes, and its plug-ins."""

import argparse
import io
import json
import threading
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from deepstack_client import ServerUnavailableError
from deepstack_client.cli import main
from deepstack_client.cli.progress import Stopwatch, WaitingNotice
from deepstack_client.testing import FakeTransport, answer, piece

CHAT = ["chat", "-p", "What number?"]


def chat(fake: FakeTransport, *words: str) -> int:
    return main([*CHAT, *words], transport_factory=lambda address: fake, commands=[])


def register_echo(subparsers) -> None:
    """A plug-in's `register`: its exit code is an argument."""
    parser = subparsers.add_parser("echo")
    parser.add_argument("code", type=int)
    parser.set_defaults(run=lambda arguments: arguments.code)


def plugin(name: str, function: str, module: str = "test_client_cli_plugin") -> EntryPoint:
    return EntryPoint(name, f"{module}:{function}", "deepstack.commands")


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> EntryPoint:
    module = argparse.Namespace(register=register_echo)
    monkeypatch.setitem(__import__("sys").modules, "test_client_cli_plugin", module)
    return plugin("echo", "register")


def test_chat_prints_the_answer_and_a_newline(capsys):
    assert chat(FakeTransport(answer("4", "2"))) == 0
    assert capsys.readouterr() == ("42\n", "")


def test_chat_sends_images_and_options(tmp_path: Path):
    paths = [tmp_path / "one.png", tmp_path / "two.png"]
    for path in paths:
        path.write_bytes(path.name.encode())
    fake = FakeTransport(answer("42"))
    main(
        ["chat", *map(str, paths), "-p", "?", "--max-tokens", "5", "--temperature", "0", "--seed", "3", "--raw-prompt"],
        transport_factory=lambda address: fake,
        commands=[],
    )
    inputs = fake.calls[0].request.inputs
    assert inputs["image"] == (b"one.png", b"two.png")
    assert json.loads(inputs["sampling_parameters"]) == {"max_tokens": 5, "temperature": 0.0, "seed": 3}
    assert inputs["raw_prompt"] is True


def test_a_dash_reads_an_image_from_standard_input(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xffpixels")))
    fake = FakeTransport(answer("42"))
    assert chat(fake, "--", "-") == 0
    assert fake.calls[0].request.inputs["image"] == (b"\xffpixels",)


def test_the_address_chooses_the_transport():
    addresses = []

    def factory(address: str) -> FakeTransport:
        addresses.append(address)
        return FakeTransport(answer("42"))

    main([*CHAT, "--address", "http://host:1"], transport_factory=factory, commands=[])
    assert addresses == ["http://host:1"]


def test_json_prints_one_object(capsys):
    chat(FakeTransport(answer("4", "2")), "--json")
    printed = json.loads(capsys.readouterr().out)
    assert (printed["text"], printed["finish_reason"], printed["num_output_tokens"]) == ("42", "stop", 2)


def test_stats_go_to_standard_error(capsys):
    chat(FakeTransport(answer("4", "2")), "--stats")
    printed = capsys.readouterr()
    assert printed.out == "42\n"
    assert "time to first token" in printed.err


def test_a_failure_is_one_line_and_exit_code_1(capsys):
    assert chat(FakeTransport([ServerUnavailableError("queue is full\ntry later")])) == 1
    assert capsys.readouterr().err == "error: queue is full try later\n"


def test_a_missing_image_is_an_error_before_anything_is_sent(capsys):
    fake = FakeTransport()
    assert chat(fake, "no/such.png") == 1
    assert capsys.readouterr().err == "error: cannot read image no/such.png: No such file or directory\n"
    assert not fake.calls


def test_ctrl_c_cancels_the_request_and_exits_130():
    fake = FakeTransport([piece("4"), KeyboardInterrupt()])
    assert chat(fake) == 130
    assert fake.calls[0].cancelled


@pytest.mark.parametrize("words", [[], ["chat"], ["chat", "-p", "?", "--max-tokens", "many"], ["unheard-of"]])
def test_wrong_usage_exits_2(words, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(words, commands=[])
    assert exit_.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_a_plug_in_s_exit_code_is_the_command_s(echo):
    assert main(["echo", "7"], commands=[echo]) == 7


def test_a_plug_in_that_is_not_wanted_is_not_imported():
    fake = FakeTransport(answer("42"))
    broken = plugin("serve", "register", module="no_such_module")
    assert main(CHAT, transport_factory=lambda address: fake, commands=[broken]) == 0


def test_help_lists_plug_ins_without_importing_them(capsys):
    with pytest.raises(SystemExit):
        main(["--help"], commands=[plugin("serve", "register", module="no_such_module")])
    assert "serve" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["serve"], ["serve", "--port", "1", "folder"], ["serve", "--help"]])
def test_serve_without_its_package_says_what_to_install(words, capsys):
    assert main(words, commands=[]) == 1
    assert "install deepstack-serving" in capsys.readouterr().err


class Terminal(io.StringIO):
    """A terminal that tells when something was written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        count = super().write(text)
        self.written.set()
        return count


def test_a_long_wait_is_shown_on_a_terminal_and_wiped_at_its_end():
    terminal = Terminal()
    with WaitingNotice(terminal, delay_s=0.0):
        assert terminal.written.wait(10)
    shown, wiped = terminal.getvalue().split("\r")[1:3]
    assert shown.startswith("waiting for the server")
    assert wiped == " " * len(shown)


def test_a_short_wait_shows_nothing():
    terminal = Terminal()
    with WaitingNotice(terminal, delay_s=60.0):
        pass
    assert terminal.getvalue() == ""


def test_nothing_is_shown_where_there_is_no_terminal():
    output = io.StringIO()
    with WaitingNotice(output, delay_s=0.0) as notice:
        notice.stop()
    assert output.getvalue() == ""


def test_tokens_per_second_are_counted_from_the_first_token():
    times = iter([10.0, 12.0, 13.0, 14.0])
    stopwatch = Stopwatch(lambda: next(times))
    for count in (1, 4, 0, 4):
        stopwatch.count(count)
    assert stopwatch.summary() == "time to first token 2.000 s, 9 tokens, 4.0 tokens/s after the first"


def test_a_single_chunk_has_no_rate():
    times = iter([10.0, 12.0])
    stopwatch = Stopwatch(lambda: next(times))
    stopwatch.count(3)
    assert stopwatch.summary() == "time to first token 2.000 s, 3 tokens"
