"""Attention over packed rows, plugged into transformers: by SDPA on any device, by paged kernels on a GPU."""

from deepstack_serving.attention.packed import ATTENTION, PackedSequence, PackedStep, packed_attention
from deepstack_serving.attention.paged import PagedLayer, paged_attention

__all__ = ["ATTENTION", "PackedSequence", "PackedStep", "PagedLayer", "packed_attention", "paged_attention"]
