"""Granite 4 Vision while training: batches, and the forward pass over a whole batch of pictures of one size."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_outputs import BaseModelOutput

from demo.architectures.granite4_tiles import CELLS, NEWLINE, PATCH_PX, PATCHES, TILE_PX, corner_labels, cut, layout_of
from demo.learner import Probes, answer_loss, embed_tokens, spread
from demo.lessons import Lesson, token_rows
from demo.tokenizer import ChatFormat


class Batch(NamedTuple):
    """Right-padded rows, one question each, and their pictures (a fixed number of rows share one).

    tiles          uint8 [pictures, 1 + tiles, 3, side, side]: thumbnail and tiles
    corner_labels  uint8 [pictures, 1 + tiles, cells, corners, 5]: what each patch shows, see granite4_tiles.py
    early_kept     [pictures, 1, 1, 1]: 0 where the early layers' features are zeroed
    token_ids      [rows, tokens]
    picture_index  [rows * tokens]: the feature, counted through the whole batch, that stands at this token; the
                   newline comes after the last
    is_picture     [rows, tokens, 1]: 1 where a feature or a newline stands
    labels         [rows, tokens], IGNORED outside of answers
    """

    tiles: Tensor
    corner_labels: Tensor
    early_kept: Tensor
    token_ids: Tensor
    picture_index: Tensor
    is_picture: Tensor
    labels: Tensor


def collate(tokenizer: Tokenizer, chat: ChatFormat, lessons: list[Lesson], size: tuple[int, int]) -> Batch:
    """All pictures have this (width, height); every row is padded to the same length."""
    layout = layout_of(*size)
    features = (1 + layout.tiles[0] * layout.tiles[1]) * CELLS**2
    rows = token_rows(tokenizer, chat, lessons, len(layout.order))
    picture_index = np.zeros_like(rows.token_ids)
    for index, (is_image, picture) in enumerate(zip(rows.is_image, rows.pictures, strict=True)):
        if is_image.any():
            source = np.where(layout.order == NEWLINE, len(lessons) * features, picture * features + layout.order)
            picture_index[index, is_image] = source
    arrays = (
        np.stack([cut(lesson.scene.picture, layout) for lesson in lessons]),
        np.stack([corner_labels(lesson.scene, layout) for lesson in lessons]),
        np.array([lesson.other_paths_kept for lesson in lessons], np.float32)[:, None, None, None],
        rows.token_ids,
        picture_index.reshape(-1),
        rows.is_image.astype(np.float32)[..., None],
        rows.labels,
    )
    return Batch(*(torch.from_numpy(values) for values in arrays))


def training_loss(model: Any, probes: Probes, batch: Batch, border: int) -> Tensor:
    """[answers' loss, probes' loss]; the features of the layers from `border` on are under test."""
    features = encode_pictures(model, batch)
    kept = {layer: level if layer >= border else level * batch.early_kept for layer, level in features.items()}
    hidden = run_language(model, batch, kept)
    logits = model.lm_head(hidden[:, :-1]) / model.config.text_config.logits_scaling
    crossing = [features[layer] for layer in model.config.spatial_target_layers]
    labels = batch.corner_labels.long().unbind(-2)
    return torch.stack([answer_loss(logits, batch.labels), probes(crossing, labels)])


def run_language(model: Any, batch: Batch, features: dict[int, Tensor]) -> Tensor:
    """Hidden states [rows, tokens, width] after the last norm."""
    inner: Any = model.model.language_model
    hidden = embed_tokens(inner.embed_tokens.weight, batch.token_ids) * inner.embedding_multiplier
    hidden = hidden * (1 - batch.is_picture)
    positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
    turns = inner.rotary_emb(hidden, position_ids=positions)
    for number, layer in enumerate(inner.layers):
        if number in features:
            vectors = torch.cat([features[number].flatten(0, 2), model.model.image_newline[None]])
            hidden = hidden + spread(vectors, batch.picture_index, batch.is_picture)
        hidden = layer(hidden, position_embeddings=turns, attention_mask=None)
    normed: Tensor = inner.norm(hidden)
    return normed


def encode_pictures(model: Any, batch: Batch) -> dict[int, Tensor]:
    """Decoder layer -> features [pictures, 1 + tiles, cells, width], without newlines."""
    tower, config = model.model.vision_tower, model.config
    pictures, tiles = batch.tiles.shape[:2]
    embeddings = tower.embeddings
    kernel = embeddings.patch_embedding
    hidden = functional.linear(as_patches(batch.tiles), kernel.weight.flatten(1), kernel.bias)
    states = [hidden + embeddings.position_embedding.weight]
    for layer in tower.encoder.layers:
        states.append(layer(states[-1], attention_mask=None))
    sources = [*config.deepstack_layer_map, *((config.spatial_vision_layer, at) for at in config.spatial_target_layers)]
    projectors = [*model.model.layerwise_projectors, *model.model.spatial_projectors]
    return {
        layer: projector(states[level]).view(pictures, tiles, CELLS**2, -1)
        for (level, layer), projector in zip(sources, projectors, strict=True)
    }


def as_patches(tiles: Tensor) -> Tensor:
    """uint8 [pictures, tiles, 3, side, side] to -1..1: [all tiles, patches, 3 * patch * patch]."""
    split = tiles.view(-1, 3, PATCHES, PATCH_PX, PATCHES, PATCH_PX).permute(0, 2, 4, 1, 3, 5)
    return split.reshape(-1, PATCHES**2, 3 * PATCH_PX**2).float().div(127.5).sub(1)


def as_pixels(tiles: Tensor) -> Tensor:
    """The same tiles as the image processor gives them: [pictures, tiles, 3, TILE_PX, TILE_PX], -1..1."""
    return tiles.view(-1, tiles.shape[1], 3, TILE_PX, TILE_PX).float().div(127.5).sub(1)


def make_fast(model: Any) -> None:
    """The same arithmetic with fewer kernels.

    The projectors run without attention masks, which they have no use for: while a CUDA graph is captured, transformers
    would make masks of ones, and they keep attention from its fast kernel. A norm of the decoder is one kernel.
    """
    for projector in (*model.model.layerwise_projectors, *model.model.spatial_projectors):
        projector.qformer.forward = _QFormerWithoutMask(projector.qformer)
    decoder = model.model.language_model
    inner = [norm for layer in decoder.layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
    for norm in (*inner, decoder.norm):
        norm.forward = _FusedNorm(norm)


class _FusedNorm:
    def __init__(self, norm: nn.Module) -> None:
        self._norm: Any = norm

    def __call__(self, hidden_states: Tensor) -> Tensor:
        weight = self._norm.weight
        return functional.rms_norm(hidden_states, weight.shape, weight, self._norm.variance_epsilon)


class _QFormerWithoutMask:
    def __init__(self, qformer: nn.Module) -> None:
        self._qformer: Any = qformer

    def __call__(self, query_embeds: Tensor, encoder_hidden_states: Tensor, return_dict: bool) -> BaseModelOutput:
        del return_dict
        encoded: BaseModelOutput = self._qformer.encoder(
            self._qformer.layernorm(query_embeds),
            encoder_hidden_states=encoder_hidden_states,
            query_length=query_embeds.shape[1],
        )
        return encoded
