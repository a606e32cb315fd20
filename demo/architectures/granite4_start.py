"""How the Granite demo's vision tower starts: its first blocks look at each patch's four neighbours.

SigLIP knows where a patch is only from a learned table. From random weights it first has to find out what lies beside
what, and on pictures of two digits, where this was tried, that kept it from telling digits apart for hundreds of steps.
Here some channels hold sines and cosines of row and column, and in the first blocks the product of query and key is
largest for the patch one step right, left, below or above. All of it is learned on from there.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

PERIOD = 20.0
SCALE = 1.05
GAIN = 4.0
NOISE = 0.02
NEIGHBOURS = ((0, 1), (0, -1), (1, 0), (-1, 0))
"""Rows down and columns right, one for each head."""
BLOCKS = 4


@torch.no_grad()
def start_tower(tower: Any) -> None:
    """Overwrite the position table, the patches' share of its channels, and the first blocks' queries and keys."""
    config, diagonal = tower.config, cast(Any, torch.block_diag)
    channels, side = config.hidden_size // config.num_attention_heads, config.image_size // config.patch_size
    frequencies = PERIOD ** -(torch.arange(0, channels, 4) / channels)
    at = torch.arange(side)[:, None] * frequencies
    waves = torch.cat([at.sin(), at.cos()], dim=-1)
    table = tower.embeddings.position_embedding.weight
    table.zero_()
    table[:, :channels] = SCALE * torch.cat([waves.repeat_interleave(side, 0), waves.repeat(side, 1)], dim=-1)
    tower.embeddings.patch_embedding.weight[:channels] = 0
    for layer in tower.encoder.layers[:BLOCKS]:
        attention = layer.self_attn
        for head, (down, right) in enumerate(NEIGHBOURS):
            rows = slice(head * channels, (head + 1) * channels)
            shift = diagonal(_shift(frequencies, down), _shift(frequencies, right))
            for projection, values in ((attention.q_proj, torch.eye(channels)), (attention.k_proj, shift)):
                projection.weight[rows] = NOISE * torch.randn(channels, config.hidden_size)
                projection.weight[rows, :channels] += GAIN * values


def _shift(frequencies: Tensor, steps: int) -> Tensor:
    """The matrix that turns the waves of a place into those of the place `steps` before it."""
    cosine, sine = (frequencies * steps).cos().diag(), (frequencies * steps).sin().diag()
    return torch.cat([torch.cat([cosine, -sine], dim=1), torch.cat([sine, cosine], dim=1)])
