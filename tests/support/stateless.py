"""Drive the stages without an engine: packed calls with no block tables, from the first stage to the last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deepstack_serving.wire import deepstack_name, feature_inputs
from tests.support.local import LocalPort


@dataclass(frozen=True)
class Rows:
    """A prompt as the stages take it: ids [tokens], positions [axes, tokens], and the encoder's features by name."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    features: dict[str, torch.Tensor]


def feature_names(port: LocalPort) -> list[str]:
    """What the encoder sends to the language stages."""
    first = next(iter(port.language.values()))
    return [spec.name for spec in feature_inputs(first.contract, first.plan)]


def packed_inputs(prompts: Sequence[Rows], image_token_id: int) -> dict[str, torch.Tensor]:
    """All tensors of one call but those that a stage makes, features of all prompts joined."""
    lengths = torch.tensor([len(item.input_ids) for item in prompts], dtype=torch.int32)
    ids = torch.cat([item.input_ids for item in prompts])
    inputs = {
        "input_ids": ids,
        "position_ids": torch.cat([item.positions for item in prompts], 1),
        "query_lengths": lengths,
        "context_lengths": lengths.clone(),
    }
    with_images = [item.features for item in prompts if item.features]
    if with_images:
        rows = torch.nonzero(ids == image_token_id)[:, 0]
        inputs |= {"image_rows": rows, "feature_rows": torch.arange(len(rows))}
        inputs |= {name: torch.cat([item[name] for item in with_images]) for name in with_images[0]}
    return inputs


def run_chain(port: LocalPort, inputs: dict[str, torch.Tensor], sampling: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Call stage after stage; each gets exactly the tensors that it declares. Returns the last stage's outputs."""
    tensors = dict(inputs)
    for name, stage in port.language.items():
        known = {spec.name for spec in stage.interface.inputs}
        if stage.plan.is_last:
            given = {key: value for key, value in (tensors | sampling).items() if key in known}
            return port.call(name, given, ["next_ids", "logprobs", "top_ids", "top_logprobs"])
        wanted = ["hidden_states", *map(deepstack_name, stage.plan.forwarded)]
        tensors |= port.call(name, {key: value for key, value in tensors.items() if key in known}, wanted)
    raise ValueError("the port has no last stage")
