"""The forward pass of training: the same modules as transformers' forward, for pictures of one size at once.

transformers walks a batch picture by picture in Python, which costs more than the arithmetic of a model this small. A
test holds `encode_pictures` against the model's own vision tower.

Digits have to arrive through deepstack: for a share of the training pictures (`MAIN_DROP`) the main image embeddings
are zeroed, so that only the deepstack features tell these pictures apart, and the language model learns to read from
those. With deepstack zeroed instead, reading fails; evaluate.py measures that.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Qwen3VLForConditionalGeneration

from demo.architecture import MERGE, PATCH_PX
from demo.batches import IGNORED, Batch

MAIN_DROP = 0.6


def training_loss(model: Qwen3VLForConditionalGeneration, batch: Batch, image_token: int) -> Tensor:
    """Mean cross entropy over the answers' tokens."""
    inner = model.model
    embeddings = inner.language_model.embed_tokens(batch.token_ids)
    vision: dict[str, Any] = {}
    if len(batch.pixels):
        main, deepstack = encode_pictures(inner.visual, batch.pixels)
        kept = torch.rand(len(main), 1, 1, device=main.device) >= MAIN_DROP
        is_image = batch.token_ids == image_token
        embeddings = embeddings.masked_scatter(is_image[..., None], (main * kept).to(embeddings.dtype))
        vision = {
            "visual_pos_masks": is_image,
            "deepstack_visual_embeds": [level.flatten(0, 1) for level in deepstack],
        }
    hidden = inner.language_model(
        inputs_embeds=embeddings, position_ids=batch.positions, use_cache=False, **vision
    ).last_hidden_state
    targets = batch.labels[:, 1:]
    answered = targets != IGNORED
    logits = model.lm_head(hidden[:, :-1][answered])
    return functional.cross_entropy(logits.float(), targets[answered])


def encode_pictures(visual: nn.Module, pixels: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Main embeddings [pictures, tokens, width] and one such tensor per deepstack level, from uint8 pixels."""
    modules: Any = visual
    pictures, height, width, _ = pixels.shape
    grid = (height // PATCH_PX, width // PATCH_PX)
    patches = to_patches(pixels)
    hidden = modules.patch_embed(patches).view(pictures, grid[0] * grid[1], -1)
    hidden = hidden + _picture_positions(modules.pos_embed.weight, grid)
    turns = _rotations(modules.rotary_pos_emb.inv_freq, grid)
    deepstack: list[Tensor] = []
    for number, block in enumerate(modules.blocks):
        hidden = hidden + _attend(block.attn, block.norm1(hidden), turns)
        hidden = hidden + block.mlp(block.norm2(hidden))
        if number in modules.deepstack_visual_indexes:
            merger = modules.deepstack_merger_list[len(deepstack)]
            deepstack.append(merger(hidden).view(pictures, -1, modules.config.out_hidden_size))
    return modules.merger(hidden).view(pictures, -1, modules.config.out_hidden_size), deepstack


def to_patches(pixels: Tensor) -> Tensor:
    """[pictures * patches, 3 * 2 * side * side], cell by cell, as the image processor orders them."""
    pictures, height, width, _ = pixels.shape
    values = pixels.float().div(127.5).sub(1).permute(0, 3, 1, 2)
    cell = MERGE * PATCH_PX
    split = values.reshape(pictures, 3, height // cell, MERGE, PATCH_PX, width // cell, MERGE, PATCH_PX)
    ordered = split.permute(0, 2, 5, 3, 6, 1, 4, 7)[:, :, :, :, :, :, None]
    return ordered.expand(*ordered.shape[:6], 2, *ordered.shape[7:]).reshape(-1, 3 * 2 * PATCH_PX * PATCH_PX)


@cache
def patch_coordinates(grid: tuple[int, int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Row and column of every patch, cell by cell."""
    index = torch.arange(grid[0] * grid[1], device=device)
    ordered = index.view(grid[0] // MERGE, MERGE, grid[1] // MERGE, MERGE).permute(0, 2, 1, 3).reshape(-1)
    return ordered // grid[1], ordered % grid[1]


def _picture_positions(table: Tensor, grid: tuple[int, int]) -> Tensor:
    """The learned square table, stretched bilinearly over the picture: [patches, width]."""
    side = round(len(table) ** 0.5)
    square = table.view(1, side, side, -1).permute(0, 3, 1, 2)
    stretched = functional.interpolate(square.float(), size=grid, mode="bilinear", align_corners=True)[0]
    rows, columns = patch_coordinates(grid, table.device)
    return stretched[:, rows, columns].T


def _rotations(inverse_frequency: Tensor, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
    rows, columns = patch_coordinates(grid, inverse_frequency.device)
    angles = torch.cat([rows[:, None] * inverse_frequency, columns[:, None] * inverse_frequency], dim=-1)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def _attend(attention: Any, hidden: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    pictures, patches, width = hidden.shape
    packed = attention.qkv(hidden).view(pictures, patches, 3, attention.num_heads, -1).permute(2, 0, 3, 1, 4)
    query, key, value = packed.unbind(0)
    mixed = functional.scaled_dot_product_attention(_turn(query, turns), _turn(key, turns), value)
    return attention.proj(mixed.transpose(1, 2).reshape(pictures, patches, width))  # type: ignore[no-any-return]


def _turn(vectors: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    first, second = vectors.chunk(2, dim=-1)
    cosine, sine = turns
    return (vectors * cosine + torch.cat([-second, first], dim=-1) * sine).to(vectors.dtype)
