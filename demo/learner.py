"""The forward pass of training: the same modules as transformers' forward, for pictures of one size at once.

transformers walks a batch picture by picture in Python, which costs more than the arithmetic of a model this small; and
its indexing by masks cannot be captured in a CUDA graph. Tests hold this pass against transformers' own.

Two things here make the digits arrive through deepstack and nowhere else:
- For a share of the training pictures (`MAIN_DROP`) the main image embeddings are zeroed, so that only the deepstack
  features tell these pictures apart, and the language model learns to read from those.
- Linear probes on each deepstack level name what every cell shows (`LABEL_COUNTS`). Their loss is added while training,
  which also makes reading emerge early; they are not part of the checkpoint. The main embeddings have no probe.
With deepstack zeroed instead, reading fails; evaluate.py measures that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Qwen3VLForConditionalGeneration

from demo.batches import IGNORED, Batch
from demo.cells import LABEL_COUNTS

PROBE_WEIGHT = 0.5


class Probes(nn.Module):
    """One linear layer per deepstack level, for training only."""

    def __init__(self, levels: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, sum(LABEL_COUNTS)) for _ in range(levels))

    def forward(self, deepstack: list[Tensor], cell_labels: Tensor) -> Tensor:
        """The loss, averaged over levels and summed over what is known of a cell."""
        losses = [
            functional.cross_entropy(logits.flatten(0, 1).float(), cell_labels[..., known].flatten())
            for layer, features in zip(self.layers, deepstack, strict=True)
            for known, logits in enumerate(layer(features).split(LABEL_COUNTS, dim=-1))
        ]
        return torch.stack(losses).sum() / len(deepstack)


def training_loss(model: Qwen3VLForConditionalGeneration, probes: Probes, batch: Batch) -> Tensor:
    """[answers' loss, probes' loss]: mean cross entropy over the answers' tokens, and what `Probes` returns."""
    main, deepstack = encode_pictures(model.model.visual, batch)
    hidden = run_language(model, batch, main * batch.main_kept, deepstack)
    logits = model.lm_head(hidden[:, :-1]).flatten(0, 1)
    loss = functional.cross_entropy(logits.float(), batch.labels[:, 1:].flatten(), ignore_index=IGNORED)
    return torch.stack([loss, probes(deepstack, batch.cell_labels)])


def run_language(model: Qwen3VLForConditionalGeneration, batch: Batch, main: Tensor, deepstack: list[Tensor]) -> Tensor:
    """Hidden states [rows, tokens, width] after the last norm."""
    inner: Any = model.model.language_model
    embeddings = _embed(inner.embed_tokens.weight, batch.token_ids)
    hidden = embeddings * (1 - batch.is_picture) + _spread(main, batch)
    turns = inner.rotary_emb(hidden, batch.positions)
    for number, layer in enumerate(inner.layers):
        hidden = layer(hidden, position_embeddings=turns, attention_mask=None)
        if number < len(deepstack):
            hidden = hidden + _spread(deepstack[number], batch)
    normed: Tensor = inner.norm(hidden)
    return normed


def encode_pictures(visual: nn.Module, batch: Batch) -> tuple[Tensor, list[Tensor]]:
    """Main embeddings [pictures, cells, width] and one such tensor per deepstack level."""
    modules: Any = visual
    pictures, count, _ = batch.patches.shape
    width = modules.config.out_hidden_size
    hidden = modules.patch_embed(as_frames(batch.patches)).view(pictures, count, -1)
    hidden = hidden + batch.stretch @ modules.pos_embed.weight
    turns = _rotations(modules.rotary_pos_emb.inv_freq, batch.coordinates)
    deepstack: list[Tensor] = []
    for number, block in enumerate(modules.blocks):
        hidden = hidden + _attend(block.attn, block.norm1(hidden), turns)
        hidden = hidden + block.mlp(block.norm2(hidden))
        if number in modules.deepstack_visual_indexes:
            merger = modules.deepstack_merger_list[len(deepstack)]
            deepstack.append(merger(hidden).view(pictures, -1, width))
    return modules.merger(hidden).view(pictures, -1, width), deepstack


def _embed(table: Tensor, token_ids: Tensor) -> Tensor:
    """A lookup as a product: its gradient needs no sorting, which a CUDA graph could not hold."""
    chosen = token_ids[..., None] == torch.arange(len(table), device=table.device)
    return chosen.to(table.dtype) @ table


def _spread(features: Tensor, batch: Batch) -> Tensor:
    """Cells to the tokens they stand at, zero elsewhere."""
    rows, tokens = batch.token_ids.shape
    return features.flatten(0, 1).index_select(0, batch.picture_index).view(rows, tokens, -1) * batch.is_picture


def as_frames(patches: Tensor) -> Tensor:
    """uint8 to -1..1, each patch twice in time, as a still picture goes in: [all patches, 3 * 2 * side * side]."""
    values = patches.float().div(127.5).sub(1).view(-1, 3, 1, patches.shape[-1] // 3)
    return values.expand(-1, -1, 2, -1).reshape(len(values), -1)


def _rotations(inverse_frequency: Tensor, coordinates: Tensor) -> tuple[Tensor, Tensor]:
    angles = torch.cat([places[:, None] * inverse_frequency for places in coordinates.unbind(0)], dim=-1)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def _attend(attention: Any, hidden: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    pictures, patches, width = hidden.shape
    packed = attention.qkv(hidden).view(pictures, patches, 3, attention.num_heads, -1).permute(2, 0, 3, 1, 4)
    query, key, value = packed.unbind(0)
    mixed = functional.scaled_dot_product_attention(_turn(query, turns), _turn(key, turns), value)
    projected: Tensor = attention.proj(mixed.transpose(1, 2).reshape(pictures, patches, width))
    return projected


def _turn(vectors: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    first, second = vectors.chunk(2, dim=-1)
    cosine, sine = turns
    return (vectors * cosine + torch.cat([-second, first], dim=-1) * sine).to(vectors.dtype)
