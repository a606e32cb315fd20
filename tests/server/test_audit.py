"""`deepstack audit` on the real server: its verdicts, its exit codes, and the server that refuses it."""

from __future__ import annotations

import json
import shutil
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from deepstack_client.cli import main, plugins
from deepstack_serving.embedded import EmbeddedServer
from deepstack_serving.settings import PREFIX
from tests.support.server import is_whole, serving

COMMAND = EntryPoint("audit", "deepstack_serving.audit.command:register", plugins.GROUP)


def audit(*words: str) -> int:
    return main(["audit", *words], commands=[COMMAND])


def without_deepstack(checkpoint: Path, folder: Path) -> Path:
    """A copy whose mergers of the deepstack levels give zeros."""
    shutil.copytree(checkpoint, folder)
    silenced = 0
    for path in folder.glob("*.safetensors"):
        weights = load_file(path)
        for name in [name for name in weights if "deepstack_merger_list" in name]:
            weights[name] = torch.zeros_like(weights[name])
            silenced += 1
        save_file(weights, path, {"format": "pt"})
    assert silenced
    return folder


def test_sound_server_passes_over_both_protocols(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(checkpoint, tmp_path / "run", audit_parameters=True) as server:
        for address in (f"grpc://{server.grpc_address}", f"http://{server.http_address}"):
            report = tmp_path / "audit.json"
            assert audit("--address", address, "--max-tokens", "4", "--json", str(report)) == 0
            assert capsys.readouterr().out.endswith("\nPASS\n")
            document = json.loads(report.read_text())
            assert document["server"]["deepstack_layers"] == [0, 1, 2]
            assert {check["verdict"] for check in document["checks"]} == {"PASS"}
        assert is_whole(server)


def test_checkpoint_whose_features_are_silent_is_vacuous(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command starts this server by itself."""
    for name, value in (("DEVICE", "cpu"), ("CPU_THREADS", "1"), ("KV_POOL_TOKENS", "3072")):
        monkeypatch.setenv(f"{PREFIX}{name}", value)
    silent = without_deepstack(checkpoint, tmp_path / "silent")
    assert audit("--start-server", "--checkpoint", str(silent), "--max-tokens", "2") == 2
    printed = capsys.readouterr().out
    assert "\nVACUOUS\n  eager: normal unlike zeroed: zeroing all deepstack layers changes nothing" in printed
    for layer in (0, 1, 2):
        assert f"  eager: normal unlike ds_{layer} zeroed: zeroing this layer changes nothing" in printed


def test_server_without_the_setting_is_not_audited(server: EmbeddedServer, capsys: pytest.CaptureFixture[str]) -> None:
    for address in (f"grpc://{server.grpc_address}", f"http://{server.http_address}"):
        assert audit("--address", address) == 3
        printed = capsys.readouterr()
        assert printed.err.startswith("error: the audit could not run: unknown request parameter 'audit_describe'")
        assert "setting 'audit_parameters' = true" in printed.err
        assert printed.out == ""


def test_unreachable_server_is_not_audited(capsys: pytest.CaptureFixture[str]) -> None:
    assert audit("--address", "grpc://127.0.0.1:1", "--timeout", "5") == 3
    assert capsys.readouterr().err.startswith("error: the audit could not run: ")
