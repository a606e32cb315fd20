"""The audit over real graphs passes: exactly without compiled layers, within the tolerance with them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deepstack_serving.audit.verdict import Verdict
from tests.support.local import LocalServer, local_settings
from tests.support.local_client import audit

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("layers", ["off", "layers"])
def test_graphs_pass_the_audit(bf16_checkpoint: Path, layers: str) -> None:
    settings = local_settings(
        bf16_checkpoint,
        device="cuda:0",
        execution="graph",
        compile=layers,
        audit_parameters=True,
        decode_batch_sizes="1,2,4,8",
        prefill_graph_tokens="128,256,512",
    )
    with LocalServer(settings) as server:
        found = audit(server, max_tokens=8)
    assert (found.verdict, found.reasons) == (Verdict.PASS, ())
    graphs = [check for check in found.checks if check.title.startswith("graph as eager")]
    assert {check.bound for check in graphs} == {0.0 if layers == "off" else found.tolerance}
