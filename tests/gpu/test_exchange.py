"""Rows that cross by pinned shared memory, also after the region was replaced by another at the same addresses."""

from __future__ import annotations

import pytest
import torch

from deepstack_serving.exchange import Exchange, ExchangeDoor, link_sizes

ROWS, WIDTH = 64, 4096


pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def stage_doors() -> list[ExchangeDoor]:
    return [ExchangeDoor(index, 2, WIDTH * 2, on_gpu=True) for index in range(2)]


@pytest.mark.parametrize("new_stages", [False, True])
def test_every_region_carries_its_own_rows(new_stages: bool) -> None:
    """Stages that go on, and stages that end with a region open."""
    doors = stage_doors()
    for seed in range(6):
        exchange = Exchange.create(link_sizes(2, ROWS, ROWS, WIDTH * 2))
        if new_stages:
            doors = stage_doors()
        try:
            check_rows(exchange, *doors, seed)
        finally:
            exchange.close()


def check_rows(exchange: Exchange, first_door: ExchangeDoor, second_door: ExchangeDoor, seed: int) -> None:
    ticket = exchange.begin()
    first, second = first_door.join(ticket, ROWS), second_door.join(ticket, ROWS)
    assert first.exchange.is_pinned
    assert second.exchange.is_pinned
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
