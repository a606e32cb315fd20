"""One compilation for all layers of a stage: a template layer, called with each layer's own parameters.

The layers are transformers' modules of one structure; `torch.func.functional_call` hands the compiled template another
layer's weights, and the keys and values of the pool come in as arguments, so nothing in the code is one layer's own.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch._inductor.config
from torch import nn
from torch._inductor.async_compile import shutdown_compile_workers
from torch._inductor.decomposition import select_decomp_table
from torch.func import functional_call
from torch.fx import GraphModule

from deepstack_serving.attention import PagedLayer
from deepstack_serving.settings import Settings, keep_compiled_code

AUTOTUNE = {"max_autotune": True, "coordinate_descent_tuning": True, "triton.cudagraphs": False}
TUNED = {"coordinate_descent_tuning": True}  # every kernel's parameters, one after the other
# Of one row, tuned products become reductions, which run at the speed of reading the weights. A kernel is then some
# microseconds long: the next one starts while it ends, and those that wait for the same rows are one.
ONE_ROW = {
    **TUNED,
    "triton.enable_pdl": True,
    "combo_kernels": True,
    "combo_kernel_per_subkernel_blocks": True,
}
Kind = tuple[tuple[str, torch.Size], ...]  # layers of one kind share a template
MAX_COMPILATIONS = 64  # of one function: decode sizes, and prefill once


def prepare_compilations(settings: Settings) -> None:
    """To be called before a process compiles anything: where code is kept, that there may be much of it, and how
    kernels are timed that are tuned.

    One function is compiled for many shapes on purpose; torch gives up after a few by default. Of a kernel's launches
    the median counts: the fastest one, torch's own measure, chose kernels that are half as fast as others.
    """
    keep_compiled_code(settings)
    torch._inductor.config.use_experimental_benchmarker = False  # torch reads it when it imports what times them
    torch._dynamo.config.recompile_limit = MAX_COMPILATIONS
    torch._dynamo.config.accumulated_recompile_limit = 4 * MAX_COMPILATIONS


def end_compilers() -> None:
    """Let the processes go with which torch compiles: all is compiled that is known of; the rest this process does.

    Torch would end them when this process ends, and wait for them, for minutes if one does not.
    """
    torch._inductor.config.compile_threads = 1
    threading.Thread(target=shutdown_compile_workers, name="end_compilers", daemon=True).start()


def compile_exact(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled once for every shape that it is called with."""
    return torch.compile(function, dynamic=False)


class CompiledLayers:
    """The compiled LayerFunction of a stage's paged steps.

    `dynamic`: one compilation for any number of rows (prefill); else one for each (decode), by exact shapes.
    """

    def __init__(self, layers: Mapping[int, nn.Module], *, dynamic: bool, autotune: bool) -> None:
        self._parameters = {
            layer: {**dict(module.named_parameters()), **dict(module.named_buffers())}
            for layer, module in layers.items()
        }
        self._kinds = {layer: _structure(parameters) for layer, parameters in self._parameters.items()}
        examples = {self._kinds[layer]: module for layer, module in layers.items()}
        # Without storage of its own: were it one of the layers, that layer would be compiled apart from the others.
        templates = {kind: _template(copy.deepcopy(module).to("meta")) for kind, module in examples.items()}
        options: Any = AUTOTUNE if autotune else None
        self._functions = _compiled(templates, dynamic, options=options)
        self._one_row = self._functions if dynamic or autotune else _compiled(templates, dynamic, backend=_one_row)

    def __call__(self, layer: int, hidden: torch.Tensor, rotary: Any, packed: PagedLayer) -> torch.Tensor:
        functions = self._one_row if hidden.shape[1] == 1 else self._functions
        return functions[self._kinds[layer]](self._parameters[layer], hidden, *rotary, *packed)


def _compiled(
    templates: Mapping[Kind, Callable[..., torch.Tensor]], dynamic: bool, **how: Any
) -> dict[Kind, Callable[..., torch.Tensor]]:
    return {
        kind: torch.compile(template, dynamic=dynamic, fullgraph=True, **how) for kind, template in templates.items()
    }


def _one_row(graph: GraphModule, inputs: Sequence[Any]) -> Any:
    """torch.compile's own backend, to which the choice of a row's experts is a sort of few values, in one kernel."""
    from torch._inductor.compile_fx import compile_fx  # imports what times kernels

    decompositions = {**select_decomp_table(), torch.ops.aten.topk.default: _topk_by_sort}
    return compile_fx(graph, inputs, config_patches=ONE_ROW, decompositions=decompositions)


def _topk_by_sort(
    values: torch.Tensor, count: int, dim: int = -1, largest: bool = True, *_: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    ordered, places = values.sort(dim=dim, descending=largest, stable=True)
    return ordered.narrow(dim, 0, count), places.narrow(dim, 0, count)


def _template(module: nn.Module) -> Callable[..., torch.Tensor]:
    def run(
        parameters: dict[str, torch.Tensor], hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *packed: Any
    ) -> torch.Tensor:
        options = {"position_embeddings": (cos, sin), "attention_mask": None, "packed": PagedLayer(*packed)}
        output: torch.Tensor = functional_call(module, parameters, (hidden,), options)
        return output

    return run


def _structure(parameters: Mapping[str, torch.Tensor]) -> Kind:
    return tuple((name, tensor.shape) for name, tensor in parameters.items())
