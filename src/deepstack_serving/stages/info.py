"""What a stage says of itself, so that the orchestrator can check that all stages belong together."""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection
from dataclasses import asdict, dataclass, field

import torch

from deepstack_serving.errors import StageError
from deepstack_serving.wire import STAGE_INFO


@dataclass(frozen=True)
class StageInfo:
    """Layers [first_layer, end_layer) and KV blocks are 0 for the vision encoder."""

    model: str
    fingerprint: str
    dtype: str
    device: str
    instance: str  # differs between two loads of the same model: a reloaded stage has an empty KV pool
    first_layer: int = 0
    end_layer: int = 0
    blocks: int = 0
    block_size: int = 0
    execution: str = "eager"  # or "graph": steps replay graphs unless a call says otherwise
    compiled: bool = False  # whether the graphs hold compiled layers
    arrivals: dict[str, int] = field(default_factory=dict, compare=False)  # calls by input and device: 'ds_0 cuda:0'

    @staticmethod
    def new_instance() -> str:
        return secrets.token_hex(8)

    def to_tensor(self) -> torch.Tensor:
        """[bytes] UINT8, as it crosses to the orchestrator."""
        return torch.tensor(list(json.dumps(asdict(self)).encode()), dtype=torch.uint8)

    @staticmethod
    def from_bytes(content: bytes) -> StageInfo:
        """Raises StageError for what another version of the stages may say."""
        try:
            return StageInfo(**json.loads(content))
        except (TypeError, ValueError) as error:
            raise StageError(f"a stage's {STAGE_INFO.name} is not of this version: {error}") from error

    def answers(self, outputs: Collection[str]) -> bool:
        """Whether a call asks for nothing but this."""
        return set(outputs) == {STAGE_INFO.name}
