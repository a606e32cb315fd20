"""The synchronous client on the fake transport: answers, cancellation, errors, readiness."""

import threading

import pytest

from deepstack_client import (
    Client,
    ConnectError,
    ProtocolError,
    RequestCancelledError,
    RequestTimeoutError,
    ServerUnavailableError,
)
from deepstack_client.testing import FakeTransport, Gate, answer, piece
from deepstack_client.transports import split_address


def test_generate_gives_the_whole_answer_of_one_unstreamed_request():
    fake = FakeTransport(answer("42"))
    completion = Client(transport=fake).generate("?", request_id="mine")
    assert (completion.text, completion.request_id) == ("42", "mine")
    assert not fake.calls[0].request.stream


def test_a_stream_gives_its_chunks_and_then_the_completion():
    with Client(transport=FakeTransport(answer("4", "2"))).stream("?") as stream:
        assert [chunk.text for chunk in stream] == ["4", "2"]
        assert stream.completion().text == "42"


def test_completion_reads_what_is_left():
    with Client(transport=FakeTransport(answer("4", "2"))).stream("?") as stream:
        next(stream)
        assert stream.completion().text == "42"


def test_leaving_a_stream_early_cancels_the_request():
    fake = FakeTransport(answer("4", "2"))
    with Client(transport=fake).stream("?") as stream:
        next(stream)
    assert fake.calls[0].cancelled


def test_a_stream_read_to_its_last_chunk_is_not_cancelled():
    fake = FakeTransport(answer("4", "2"))
    with Client(transport=fake).stream("?") as stream:
        next(stream)
        next(stream)
    assert not fake.calls[0].cancelled


def test_an_interrupt_while_waiting_cancels_the_request():
    fake = FakeTransport([piece("4"), KeyboardInterrupt()])
    with pytest.raises(KeyboardInterrupt):
        Client(transport=fake).generate("?")
    assert fake.calls[0].cancelled


def test_closing_from_another_thread_ends_a_blocked_read():
    gate = Gate()
    stream = Client(transport=FakeTransport([gate])).stream("?")
    closer = threading.Thread(target=lambda: gate.wait_until_reached() and stream.close())
    closer.start()
    with pytest.raises(RequestCancelledError):
        next(stream)
    closer.join()


def test_a_closed_stream_gives_nothing_more():
    stream = Client(transport=FakeTransport(answer("42"))).stream("?")
    stream.close()
    with pytest.raises(RequestCancelledError, match="closed"):
        next(stream)


def test_an_error_in_the_middle_is_raised_after_the_chunks_before_it():
    stream = Client(transport=FakeTransport([piece("4"), ServerUnavailableError("draining")])).stream("?")
    assert next(stream).text == "4"
    with pytest.raises(ServerUnavailableError, match="draining"):
        next(stream)


def test_a_failed_request_is_not_sent_again():
    fake = FakeTransport([ServerUnavailableError("busy")], answer("42"))
    with pytest.raises(ServerUnavailableError):
        Client(transport=fake).generate("?")
    assert len(fake.calls) == 1


def test_a_request_whose_contract_is_broken_is_cancelled():
    fake = FakeTransport([piece("4", finish_reason="stop"), piece("2"), piece("0")])
    with pytest.raises(ProtocolError):
        Client(transport=fake).generate("?")
    assert fake.calls[0].cancelled


def test_the_time_limit_reaches_the_transport():
    fake = FakeTransport(answer("42"))
    Client(transport=fake, timeout_s=7.0).generate("?")
    assert fake.calls[0].timeout_s == 7.0


def test_a_gate_that_stays_shut_times_out():
    with pytest.raises(RequestTimeoutError):
        Client(transport=FakeTransport([Gate()])).generate("?", timeout_s=0.01)


def test_two_streams_can_be_read_in_turns():
    client = Client(transport=FakeTransport(answer("a", "b"), answer("c", "d")))
    pairs = zip(client.stream("?"), client.stream("?"), strict=True)
    assert [(one.text, two.text) for one, two in pairs] == [("a", "c"), ("b", "d")]


def test_leaving_the_client_closes_its_transport():
    fake = FakeTransport()
    with Client(transport=fake):
        pass
    assert fake.closed


@pytest.mark.parametrize("readiness, ready", [(True, True), (False, False), (ConnectError("refused"), False)])
def test_is_ready_is_false_also_for_a_server_that_cannot_be_reached(readiness, ready):
    assert Client(transport=FakeTransport(readiness=[readiness])).is_ready() is ready


def test_wait_until_ready_asks_until_the_server_is_ready():
    client = Client(transport=FakeTransport(readiness=[ConnectError("refused"), False, True]))
    client.wait_until_ready(timeout_s=30)
    assert client.is_ready()


@pytest.mark.parametrize("readiness, reason", [(False, "not loaded yet"), (ConnectError("refused"), "refused")])
def test_wait_until_ready_gives_up_with_the_reason(readiness, reason):
    with pytest.raises(RequestTimeoutError, match=reason):
        Client(transport=FakeTransport(readiness=[readiness])).wait_until_ready(timeout_s=0.01)


@pytest.mark.parametrize(
    "address, parts",
    [
        ("grpc://host:9", ("grpc", "host", 9)),
        ("http://host:9/", ("http", "host", 9)),
        ("host:9", ("grpc", "host", 9)),
        ("http://host", ("http", "host", 8000)),
        ("grpc://[::1]:9", ("grpc", "::1", 9)),
    ],
)
def test_addresses(address, parts):
    assert split_address(address) == parts


@pytest.mark.parametrize("address", ["", "ftp://host:1", "grpc://host:port", "http://host:1/path", "grpc://:1"])
def test_a_bad_address_is_refused_with_the_form_that_is_wanted(address):
    with pytest.raises(ConnectError, match="grpc://host:port"):
        Client(address)
