"""How code for a single row is compiled: tuned, and with its experts chosen by a sort, which one kernel can do."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from deepstack_serving.execution import compiled

ROWS = torch.tensor([[0.1, 0.4, 0.4, 0.0, 0.9, 0.4, 0.2]])


def choose(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    best = torch.topk(values, 3, dim=-1)
    return best.values, best.indices


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What torch's compiler is given."""
    arguments: dict[str, Any] = {}

    def compile_nothing(graph: torch.fx.GraphModule, _inputs: object, **options: Any) -> torch.fx.GraphModule:
        arguments.update(options)
        return graph

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_nothing)
    compiled._one_row(torch.fx.symbolic_trace(choose), [ROWS])
    return arguments


def test_experts_are_chosen_by_a_sort(given: dict[str, Any]) -> None:
    graph = make_fx(choose, decomposition_table=given["decompositions"])(ROWS)
    targets = {str(node.target) for node in graph.graph.nodes}
    assert not any("topk" in target for target in targets)
    assert any("sort" in target for target in targets)
    values, places = graph(ROWS)
    assert values.tolist() == choose(ROWS)[0].tolist()
    assert places.tolist() == [[4, 1, 2]]  # of equal ones the first, as torch's own kernel has it


def test_its_kernels_are_tuned_and_start_early(given: dict[str, Any]) -> None:
    assert given["config_patches"] == compiled.ONE_ROW
    for name in compiled.ONE_ROW:  # torch ignores none: an option that it does not know would be an error
        assert torch._inductor.config.get_type(name) is bool


def test_the_way_of_timing_is_chosen_before_torch_reads_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    values = {"checkpoint": str(tmp_path), "compile_cache_folder": str(tmp_path)}
    program = f"""
        import sys
        from deepstack_serving.settings import parse_settings
        from deepstack_serving.stages import language, vision
        from deepstack_serving.execution.compiled import prepare_compilations
        prepare_compilations(parse_settings({values}))
        assert "torch._inductor.runtime.benchmarking" not in sys.modules
        from torch._inductor.runtime import benchmarking
        assert not benchmarking.inductor_config.use_experimental_benchmarker
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)
