"""The asynchronous client on the fake transport; the rules are the synchronous client's."""

import asyncio

import pytest

from deepstack_client import AsyncClient, ConnectError, RequestCancelledError, RequestTimeoutError, ServerError
from deepstack_client.testing import FakeTransport, Gate, answer, piece


def client(*scripts, **options) -> tuple[AsyncClient, FakeTransport]:
    fake = FakeTransport(*scripts, **options)
    return AsyncClient(transport=fake.as_async()), fake


def test_generate_gives_the_whole_answer():
    async def run() -> str:
        asking, _ = client(answer("42"))
        async with asking:
            return (await asking.generate("?")).text

    assert asyncio.run(run()) == "42"


def test_a_stream_gives_its_chunks_and_then_the_completion():
    async def run() -> tuple[list[str], str]:
        asking, _ = client(answer("4", "2"))
        async with asking.stream("?") as stream:
            return [chunk.text async for chunk in stream], (await stream.completion()).text

    assert asyncio.run(run()) == (["4", "2"], "42")


def test_leaving_a_stream_early_cancels_the_request():
    async def run() -> bool:
        asking, fake = client(answer("4", "2"))
        async with asking.stream("?") as stream:
            await stream.__anext__()
        return fake.calls[0].cancelled

    assert asyncio.run(run())


def test_cancelling_the_task_cancels_the_request():
    async def run() -> bool:
        gate = Gate()
        asking, fake = client([gate])
        task = asyncio.create_task(asking.generate("?"))
        await asyncio.to_thread(gate.wait_until_reached)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return fake.calls[0].cancelled

    assert asyncio.run(run())


def test_a_closed_stream_gives_nothing_more():
    async def run() -> None:
        asking, _ = client(answer("42"))
        stream = asking.stream("?")
        stream.close()
        await stream.completion()

    with pytest.raises(RequestCancelledError):
        asyncio.run(run())


def test_an_error_in_the_middle_is_raised():
    async def run() -> None:
        asking, _ = client([piece("4"), ServerError("broken")])
        await asking.generate("?")

    with pytest.raises(ServerError, match="broken"):
        asyncio.run(run())


def test_more_requests_than_a_thread_pool_holds_run_at_once():
    async def run() -> int:
        gates = [Gate() for _ in range(40)]
        asking, _ = client(*([gate, *answer("42")] for gate in gates))
        tasks = [asyncio.create_task(asking.generate("?")) for _ in gates]
        for gate in gates:
            await asyncio.to_thread(gate.wait_until_reached)
        for gate in gates:
            gate.open()
        return len(await asyncio.gather(*tasks))

    assert asyncio.run(run()) == 40


def test_wait_until_ready_asks_until_the_server_is_ready():
    async def run() -> bool:
        asking, _ = client(readiness=[ConnectError("refused"), True])
        await asking.wait_until_ready(timeout_s=30)
        return await asking.is_ready()

    assert asyncio.run(run())


def test_wait_until_ready_gives_up_with_the_reason():
    async def run() -> None:
        asking, _ = client(readiness=[ConnectError("refused")])
        assert not await asking.is_ready()
        await asking.wait_until_ready(timeout_s=0.01)

    with pytest.raises(RequestTimeoutError, match="refused"):
        asyncio.run(run())
