"""The steps that candidates of paged attention are timed on, and their inputs: 36 layers' pools, so no cache helps."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepstack_serving.attention import PagedLayer

LAYERS, HEADS, KV_HEADS, DIM, BLOCK_SIZE = 36, 32, 8, 128, 128
SCALE = DIM**-0.5
_DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Work:
    """One step: what each sequence asks and how long its context is then."""

    name: str
    queries: tuple[int, ...]
    contexts: tuple[int, ...]

    @property
    def rows(self) -> int:
        return sum(self.queries)

    @property
    def is_decode(self) -> bool:
        return max(self.queries) == 1

    @property
    def kv_bytes(self) -> int:
        """Keys and values of the contexts in one layer."""
        return sum(self.contexts) * 2 * KV_HEADS * DIM * _DTYPE.itemsize

    @property
    def operations(self) -> int:
        """Multiplications and additions of one layer, what the causal mask hides left out."""
        pairs = sum(
            queries * context - queries * (queries - 1) // 2
            for queries, context in zip(self.queries, self.contexts, strict=True)
        )
        return 4 * pairs * HEADS * DIM


def decode(sequences: int, context: int) -> Work:
    return Work(f"decode {sequences} x {context}", (1,) * sequences, (context,) * sequences)


WORK = (
    *(decode(sequences, 1_100) for sequences in (1, 16, 64)),
    *(Work(f"prefill {rows}", (rows,), (rows,)) for rows in (128, 1_088, 4_096)),
    Work("prefill 1088 up to 32768", (1_088,), (32_768,)),
    Work("mixed: 1088 new, 16 x 1100", (*(1,) * 16, 1_088), (*(1_100,) * 16, 1_088)),
)


@dataclass(frozen=True)
class Inputs:
    """A step's tensors: rows of the new tokens, and the layout with each layer's pool."""

    work: Work
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    layers: tuple[PagedLayer, ...]

    @property
    def sequences(self) -> int:
        return len(self.work.queries)

    @property
    def longest(self) -> int:
        return max(self.work.contexts)

    def write(self, layer: PagedLayer) -> None:
        """What `paged_attention` does first, for candidates that do not."""
        for pool, new in ((layer.keys, self.key), (layer.values, self.value)):
            pool.flatten(0, 1).index_copy_(0, layer.slots, new)


def make_inputs(work: Work) -> Inputs:
    columns = -(-max(work.contexts) // BLOCK_SIZE)
    blocks = torch.randperm(len(work.queries) * columns, device="cuda")
    tables = blocks.view(-1, columns).to(torch.int32)
    starts = torch.tensor([0, *work.queries], device="cuda").cumsum(0).to(torch.int32)
    contexts = torch.tensor(work.contexts, dtype=torch.int32, device="cuda")
    slots = []
    for number, (queries, context) in enumerate(zip(work.queries, work.contexts, strict=True)):
        place = torch.arange(context - queries, context, device="cuda")
        slots.append(tables[number].long()[place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE)
    pools = torch.empty(LAYERS, 2, len(blocks), BLOCK_SIZE, KV_HEADS, DIM, dtype=_DTYPE, device="cuda").normal_()
    places = torch.cat(slots)
    layers = tuple(
        PagedLayer(keys, values, places, tables, starts, contexts, max(work.queries)) for keys, values in pools
    )
    query, key, value = (
        torch.randn(work.rows, heads, DIM, dtype=_DTYPE, device="cuda") for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    return Inputs(work, query, key, value, layers)
