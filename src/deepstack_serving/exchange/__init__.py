"""How the language stages hand each other rows within one call, through shared memory."""

from deepstack_serving.exchange.links import STEP_TIMEOUT_S, WAIT_TIMEOUT_S, BurstLinks, ExchangeDoor, Link
from deepstack_serving.exchange.region import MAX_DECODE_STEPS, MESSAGES, Exchange, LinkMemory, LinkSize, link_sizes

__all__ = [
    "MAX_DECODE_STEPS",
    "MESSAGES",
    "STEP_TIMEOUT_S",
    "WAIT_TIMEOUT_S",
    "BurstLinks",
    "Exchange",
    "ExchangeDoor",
    "Link",
    "LinkMemory",
    "LinkSize",
    "link_sizes",
]
