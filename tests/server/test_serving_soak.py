"""Many short requests, some failing and some given up: the processes' memory does not grow with their number."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from deepstack_serving.embedded import EmbeddedServer
from deepstack_serving.regions import REGION_DIRECTORY, region_prefix
from tests.support.asking import picture
from tests.support.raw_client import Stream, ask, request
from tests.support.server import MODELS, is_whole

REQUESTS = 1500
CLIENTS = 8
ROUND = 5
MEBIBYTE = 1 << 20
RESIDENT_GROWTH = 24 * MEBIBYTE  # of one process; a leak of 32 KiB a request would be more
REGION_GROWTH = 8 * MEBIBYTE


def answered(server: EmbeddedServer, number: int) -> None:
    assert ask(server, request("hello", max_tokens=2)).finals == 1


def answered_with_a_new_image(server: EmbeddedServer, number: int) -> None:
    assert ask(server, request("what?", [picture(64, 96, number)], max_tokens=2, logprobs=2)).token_ids


def refused(server: EmbeddedServer, number: int) -> None:
    assert ask(server, request("what?", [b"no picture"])).error


def failing_in_the_encoder(server: EmbeddedServer, number: int) -> None:
    file = picture(64, 64, number)
    assert ask(server, request("what?", [file[: len(file) // 2]])).error


def given_up(server: EmbeddedServer, number: int) -> None:
    with Stream(server.grpc_address, request("hello", stream=True, max_tokens=200)) as stream:
        stream.receive(number % 3)


KINDS: tuple[Callable[[EmbeddedServer, int], None], ...] = (
    answered,
    answered_with_a_new_image,
    refused,
    failing_in_the_encoder,
    given_up,
)
assert len(KINDS) == ROUND


def send(server: EmbeddedServer, first: int, end: int) -> None:
    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(lambda number: KINDS[number % ROUND](server, number), range(first, end)))
    assert is_whole(server)


def resident(server: EmbeddedServer) -> dict[str, int]:
    """Bytes of memory by process: the stubs' and the server's."""
    processes = {f"{model}[{index}]": i for model in MODELS for index, i in enumerate(server.stub_process_ids(model))}
    processes["tritonserver"] = server.process_id
    pages = {name: int(Path(f"/proc/{number}/statm").read_text().split()[1]) for name, number in processes.items()}
    shared = {name: int(Path(f"/proc/{number}/statm").read_text().split()[2]) for name, number in processes.items()}
    return {name: (pages[name] - shared[name]) * 4096 for name in processes}


def regions(server: EmbeddedServer) -> int:
    """Bytes of shared memory in use."""
    files = REGION_DIRECTORY.glob(f"{region_prefix(server.process_id)}*")
    return sum(file.stat().st_blocks * 512 for file in files)


def test_memory_does_not_grow_with_the_number_of_requests(server: EmbeddedServer) -> None:
    send(server, 0, REQUESTS // 3)
    before, region_bytes = resident(server), regions(server)
    send(server, REQUESTS // 3, REQUESTS)
    grown = {name: value - before[name] for name, value in resident(server).items()}
    assert max(grown.values()) < RESIDENT_GROWTH, grown
    assert regions(server) - region_bytes < REGION_GROWTH
