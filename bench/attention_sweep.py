"""This project's attention kernels with other tiles and splits than those that paged_launch chooses."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from bench.attention_arms import Attend
from bench.attention_work import SCALE, Inputs
from deepstack_serving.attention import PagedLayer

_SPLIT_TILES = ((32, 4, 5), (32, 4, 7), (64, 4, 3), (64, 4, 5), (64, 4, 7), (64, 8, 5), (128, 4, 3), (128, 8, 5))
_QUERY_TILES = (
    *((128, 64, 8, 3), (128, 64, 8, 5), (128, 128, 8, 3), (128, 32, 8, 5), (128, 64, 4, 3)),
    *((64, 64, 4, 3), (64, 64, 4, 5), (64, 32, 4, 5), (64, 128, 4, 3), (256, 64, 8, 3)),
)


def sweep_arms(inputs: Inputs) -> Iterator[tuple[str, Callable[[Inputs], Attend]]]:
    """Named as the fields of Tiles; splits as factors of what is chosen."""
    if inputs.work.is_decode:
        for context, warps, stages in _SPLIT_TILES:
            for factor in (0.5, 1, 2):
                yield f"{context} context {warps}w {stages}s x{factor:g}", by_splits(context, warps, stages, factor)
    else:
        for tiles in _QUERY_TILES:
            yield "{} lines {} context {}w {}s".format(*tiles), by_queries(tiles)


def by_splits(context: int, warps: int, stages: int, factor: float) -> Callable[[Inputs], Attend]:
    from deepstack_serving.attention.paged_launch import Step, Tiles, shape_of, splits_of, tiles_of_splits

    def make(inputs: Inputs) -> Attend:
        def attend(layer: PagedLayer) -> torch.Tensor:
            shape, output = shape_of(inputs.query, layer), torch.empty_like(inputs.query)
            chosen = tiles_of_splits(shape)
            splits = max(1, round(splits_of(shape, chosen) * factor))
            step = Step(inputs.query, inputs.key, inputs.value, layer, output, SCALE, shape)
            step.attend_by_splits(Tiles(chosen.lines, context, warps, stages), splits, writes=True)
            return output

        return attend

    return make


def by_queries(tiles: tuple[int, int, int, int]) -> Callable[[Inputs], Attend]:
    from deepstack_serving.attention.paged_launch import Step, Tiles, shape_of

    def make(inputs: Inputs) -> Attend:
        def attend(layer: PagedLayer) -> torch.Tensor:
            shape, output = shape_of(inputs.query, layer), torch.empty_like(inputs.query)
            step = Step(inputs.query, inputs.key, inputs.value, layer, output, SCALE, shape)
            step.write()
            step.attend_by_queries(Tiles(*tiles), skip_single=False)
            return output

        return attend

    return make
