"""Rows that cross by pinned shared memory, also after the region was replaced by another at the same addresses."""

from __future__ import annotations

from pathlib import Path

import torch

from deepstack_serving.exchange import Exchange, ExchangeDoor, link_sizes

ROWS, WIDTH = 64, 4096


def test_every_region_carries_its_own_rows(tmp_path: Path) -> None:
    doors = [ExchangeDoor(index, 2, WIDTH * 2, tmp_path, on_gpu=True) for index in range(2)]
    for seed in range(6):
        exchange = Exchange.create(link_sizes(2, ROWS, WIDTH * 2), tmp_path)
        ticket = exchange.begin()
        first, second = (door.join(ticket, ROWS) for door in doors)
        assert all(door._exchange is not None and door._exchange._is_pinned for door in doors)
        for step in range(3):
            generator = torch.Generator("cuda").manual_seed(10 * seed + step)
            rows = torch.randn(ROWS, WIDTH, device="cuda", generator=generator).bfloat16()
            first.outgoing.send(rows)
            received = torch.empty_like(rows)
            assert second.incoming.receive(received)
            assert torch.equal(received, rows)
            second.outgoing.send(torch.arange(ROWS, device="cuda") + step)
            ids = torch.empty(ROWS, dtype=torch.int64, device="cuda")
            assert first.incoming.receive(ids)
            assert ids.tolist() == [row + step for row in range(ROWS)]
        exchange.close()
