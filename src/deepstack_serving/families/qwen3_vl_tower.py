"""The vision tower of Qwen3-VL without host work: transformers' module, given beforehand what it makes of the grids."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
)

from deepstack_serving.families.base import VisionFeatures
from deepstack_serving.families.vision_attention import FLASH, SEGMENTS, fits_flash
from deepstack_serving.families.vision_tower import CapturableTower, Compiler, TowerCall
from deepstack_serving.feature_cache import FeatureCache

GRID_BYTES = 64 * 2**20  # of what is kept for grids that were seen: 64 bytes a patch
# Images, and their size in tokens; as many rows as a layer has columns would be compiled for that number alone.
_EXAMPLES = ((1, 7, 9), (1, 7, 18), (2, 7, 9), (2, 7, 18))
_USUAL_EXAMPLE = (1, 31, 33)


@dataclass(frozen=True)
class _Grids:
    """Keyword arguments of the tower that depend on the grids alone, on its device, and the patches of each frame."""

    tensors: Mapping[str, torch.Tensor]
    layout: tuple[int, ...]


class PatchProjection(nn.Module):
    """A convolution whose kernel covers its whole input: one matrix product over the patches."""

    def __init__(self, convolution: nn.Conv3d) -> None:
        super().__init__()
        self.weight, self.bias = convolution.weight, convolution.bias

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """patches [rows, channels, time, height, width] -> [rows, width of the tower]."""
        return functional.linear(patches.flatten(1), self.weight.flatten(1), self.bias)


class SharedBlock(nn.Module):
    """A block that runs through a function which all blocks share, with its own weights."""

    def __init__(self, block: nn.Module, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.block = block
        self._function = function
        self._weights = dict(block.named_parameters())

    def forward(self, hidden: torch.Tensor, **options: Any) -> torch.Tensor:
        """hidden [rows, width] -> [rows, width]."""
        return self._function(self._weights, hidden, options)


class GridTower(CapturableTower):
    """Takes over the loaded tower: its attention, its patch embedding and, once compiled, its blocks."""

    def __init__(self, visual: Any) -> None:
        self._visual = visual
        self._merge = int(visual.config.spatial_merge_size)
        weight = visual.patch_embed.proj.weight
        self._device, self._dtype, self._patch = weight.device, weight.dtype, weight[0].numel()
        head_dim = visual.config.hidden_size // visual.config.num_heads
        self._flash = fits_flash(self._device, self._dtype, head_dim)
        visual.config._attn_implementation = FLASH if self._flash else SEGMENTS
        visual.patch_embed.proj = PatchProjection(visual.patch_embed.proj)
        self._seen: FeatureCache[_Grids] = FeatureCache(GRID_BYTES)

    @property
    def can_compile(self) -> bool:
        return self._flash  # otherwise the code depends on the length of every image

    def arrange(self, inputs: Mapping[str, torch.Tensor]) -> TowerCall:
        pixels, grid = patches(inputs)
        key = repr(grid.tolist())
        grids = self._seen.get(key)
        if grids is None:
            grids = self._grids(grid)
            self._seen.put(key, grids, sum(tensor.nbytes for tensor in grids.tensors.values()))
        return TowerCall({"hidden_states": pixels.to(self._device, self._dtype), **grids.tensors}, grids.layout)

    def run(self, call: TowerCall) -> VisionFeatures:
        options: dict[str, Any] = {} if self._flash else {"segment_lengths": call.layout}
        output = self._visual(grid_thw=None, max_seqlen=max(call.layout), return_dict=True, **call.tensors, **options)
        return VisionFeatures(output.pooler_output, dict(enumerate(output.deepstack_features)))

    def compile_blocks(self, compiler: Compiler) -> None:
        blocks = self._visual.blocks
        # Without weights of its own: code that is compiled for a block which is the template would not fit the others.
        template = copy.deepcopy(blocks[0]).to("meta")

        def run_block(weights: dict[str, torch.Tensor], hidden: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
            output: torch.Tensor = functional_call(template, weights, (hidden,), options)
            return output

        function = compiler(run_block)
        for number, block in enumerate(blocks):
            blocks[number] = SharedBlock(block, function)

    def examples(self) -> Iterator[dict[str, torch.Tensor]]:
        return map(self._example, _EXAMPLES)

    def usual_example(self) -> dict[str, torch.Tensor]:
        return self._example(_USUAL_EXAMPLE)

    def _example(self, size: tuple[int, int, int]) -> dict[str, torch.Tensor]:
        """Inputs of so many images, of so many tokens down and across."""
        images, down, across = size[0], size[1] * self._merge, size[2] * self._merge
        pixels = torch.zeros(images * down * across, self._patch)
        return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, down, across]] * images)}

    def _grids(self, grid: torch.Tensor) -> _Grids:
        """transformers' own functions, on the host."""
        visual = self._visual
        indices, weights = get_vision_interpolation_indices_and_weights(
            grid,
            num_grid_per_side=visual.num_grid_per_side,
            mode=visual.interpolation_mode,
            align_corners=visual.interpolation_align_corners,
            spatial_merge_size=self._merge,
        )
        bounds = get_vision_cu_seqlens(grid)
        tensors = {
            "interp_indices": indices,
            "interp_weights": weights,
            "position_ids": get_vision_position_ids(grid, self._merge),
            "cu_seqlens": bounds,
        }
        layout = tuple(int(length) for length in bounds.diff())
        return _Grids({name: tensor.to(self._device) for name, tensor in tensors.items()}, layout)


def patches(inputs: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Pixels [patches, values] and grids [images or videos, 3] of either kind of input."""
    if "pixel_values_videos" in inputs:
        return inputs["pixel_values_videos"], inputs["video_grid_thw"]
    return inputs["pixel_values"], inputs["image_grid_thw"]
