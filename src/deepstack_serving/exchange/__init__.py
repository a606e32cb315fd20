"""How the language stages hand each other rows within one call, through shared memory."""

from deepstack_serving.exchange.links import BurstLinks, ExchangeDoor, Link
from deepstack_serving.exchange.region import MAX_DECODE_STEPS, MESSAGES, Exchange, LinkMemory, LinkSize, link_sizes

__all__ = [
    "MAX_DECODE_STEPS",
    "MESSAGES",
    "BurstLinks",
    "Exchange",
    "ExchangeDoor",
    "Link",
    "LinkMemory",
    "LinkSize",
    "link_sizes",
]
