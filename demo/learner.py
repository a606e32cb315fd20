"""What the forward passes of training share: the same modules as transformers' forward, for pictures of one size.

transformers walks a batch picture by picture in Python, which costs more than the arithmetic of a model this small; and
its indexing by masks cannot be captured in a CUDA graph. Tests hold each pass against transformers' own.

Two things here make the digits arrive through the features under test and nowhere else (Qwen3-VL: all deepstack
features; Granite: those that cross the border between two language stages):
- For a share of the training pictures (`OTHER_PATHS_DROP`) whatever else reaches the image tokens is zeroed, so that
  only the features under test tell these pictures apart, and the language model learns to read from those.
- Linear probes on each level of them name what every cell shows (`LABEL_COUNTS`). Their loss is added while training,
  which also makes reading emerge early; they are not part of the checkpoint. Nothing else has a probe.
With these features zeroed instead, reading fails; evaluate.py measures that.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from demo.labels import LABEL_COUNTS
from demo.lessons import IGNORED

PROBE_WEIGHT = 0.5


class Probes(nn.Module):
    """One linear layer per level, for training only."""

    def __init__(self, levels: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, sum(LABEL_COUNTS)) for _ in range(levels))

    def forward(self, features: Sequence[Tensor], labels: Sequence[Tensor]) -> Tensor:
        """The loss, averaged over levels and summed over what is known of a cell.

        Per level features [..., cells, width] and labels [..., cells, len(LABEL_COUNTS)].
        """
        losses = [
            functional.cross_entropy(logits.flatten(0, -2).float(), known.flatten())
            for layer, level, cells in zip(self.layers, features, labels, strict=True)
            for logits, known in zip(layer(level).split(LABEL_COUNTS, dim=-1), cells.unbind(-1), strict=True)
        ]
        return torch.stack(losses).sum() / len(features)


def answer_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy over the answers' tokens; logits [rows, tokens - 1, vocabulary], labels [rows, tokens]."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=IGNORED)


def embed_tokens(table: Tensor, token_ids: Tensor) -> Tensor:
    """A lookup as a product: its gradient needs no sorting, which a CUDA graph could not hold."""
    chosen = token_ids[..., None] == torch.arange(len(table), device=table.device)
    return chosen.to(table.dtype) @ table


def spread(vectors: Tensor, index: Tensor, is_picture: Tensor) -> Tensor:
    """Vectors [count, width] to the tokens they stand at, zero elsewhere: [rows, tokens, width].

    `index` [rows * tokens] says which vector stands where, `is_picture` [rows, tokens, 1] is 1 where one does.
    """
    rows, tokens, _ = is_picture.shape
    return vectors.index_select(0, index).view(rows, tokens, -1) * is_picture
