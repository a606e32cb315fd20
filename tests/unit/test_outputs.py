"""From tokens to responses: what waits for a client becomes one response, and every token counts once."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from deepstack_serving.engine import outputs
from deepstack_serving.engine.events import Begin, Event, Failure, Tokens
from deepstack_serving.engine.outputs import OutputWorker
from deepstack_serving.engine.ports import Output
from deepstack_serving.engine.request import GenerationRequest, OutputOptions
from deepstack_serving.engine.sampling_parameters import SamplingParameters
from deepstack_serving.engine.sequence import Sequence
from deepstack_serving.errors import CancelledError, StageError
from tests.support.local import CollectingReply
from tests.support.sequences import sequence

TEXT = "the quick fox jumps over"


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer.from_file(str(checkpoint / "tokenizer.json"))


def ids_of(tokenizer: Tokenizer, text: str = TEXT) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def asked(stream: bool = True, stop: tuple[str, ...] = (), logprobs: int = 0) -> Sequence:
    made = sequence(3, 100)
    output = OutputOptions(stream=stream, logprobs=logprobs > 0)
    made.request = GenerationRequest("text", None, (), False, SamplingParameters(stop=stop, logprobs=logprobs), output)
    return made


def tokens(item: Sequence, ids: list[int], reason: str | None = None, *, eos: bool = False) -> Tokens:
    top = [([token], [-1.0]) for token in ids] if item.request.sampling.logprobs else ()
    return Tokens(item, ids, [-0.25 * token for token in ids], top, reason, eos)


def outcome(tokenizer: Tokenizer, item: Sequence, steps: list[list[Event]]) -> tuple[CollectingReply, list[Sequence]]:
    """What the client was told when all these were waiting, and the requests that the engine is told to end."""
    ended: list[Sequence] = []
    worker = OutputWorker(tokenizer, ended.append)
    worker.put([Begin(item)])
    for events in steps:
        worker.put(events)
    worker.close()
    worker.run()
    reply: Any = item.reply
    return reply, ended


def one_by_one(item: Sequence, ids: list[int]) -> list[list[Event]]:
    last = len(ids) - 1
    return [[tokens(item, [token], "length" if place == last else None)] for place, token in enumerate(ids)]


def test_what_waits_becomes_one_response(tokenizer: Tokenizer) -> None:
    item, ids = asked(), ids_of(tokenizer)
    reply, ended = outcome(tokenizer, item, one_by_one(item, ids))
    (output,) = reply.outputs
    assert (output.text, output.output_tokens, output.finish_reason) == (TEXT, len(ids), "length")
    assert output.cumulative_logprob == pytest.approx(-0.25 * sum(ids))
    assert ended == []


def test_tokens_of_a_burst_count_like_single_ones(tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer)
    single, burst = asked(logprobs=1), asked(logprobs=1)
    (one,) = outcome(tokenizer, single, one_by_one(single, ids))[0].outputs
    steps: list[list[Event]] = [[tokens(burst, ids[:4])], [tokens(burst, ids[4:], "length")]]
    (other,) = outcome(tokenizer, burst, steps)[0].outputs
    assert one == other
    assert [entry["token"] for entry in one.logprobs] == [tokenizer.decode([token]) for token in ids]


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_behind_a_stop_string_do_not_count(tokenizer: Tokenizer, stream: bool) -> None:
    item, ids = asked(stream, stop=("fox",), logprobs=1), ids_of(tokenizer)
    needed = next(count for count in range(len(ids)) if "fox" in tokenizer.decode(ids[:count]))
    reply, ended = outcome(tokenizer, item, [[tokens(item, ids)]])
    (output,) = reply.outputs
    assert (output.text, output.output_tokens, output.finish_reason) == ("the quick ", needed, "stop")
    assert len(output.logprobs) == needed < len(ids)
    assert output.cumulative_logprob == pytest.approx(-0.25 * sum(ids[:needed]))
    assert ended == [item]


def test_end_of_sequence_counts_and_is_no_text(tokenizer: Tokenizer) -> None:
    item, ids = asked(), ids_of(tokenizer)
    reply, ended = outcome(tokenizer, item, [[tokens(item, ids, "stop", eos=True)]])
    (output,) = reply.outputs
    assert (output.text, output.output_tokens) == (tokenizer.decode(ids[:-1]), len(ids))
    assert ended == []


def test_tokens_before_a_failure_are_told(tokenizer: Tokenizer) -> None:
    item, ids = asked(), ids_of(tokenizer)
    reply, _ = outcome(tokenizer, item, [[tokens(item, ids), Failure(item, StageError("over"))]])
    assert [output.text for output in reply.outputs] == [TEXT]
    assert (str(reply.error), reply.finals) == ("over", 1)


def test_nothing_is_told_behind_the_end(tokenizer: Tokenizer) -> None:
    item, ids = asked(), ids_of(tokenizer)
    steps: list[list[Event]] = [[tokens(item, ids, "length")], [Failure(item, StageError("late"))]]
    reply, _ = outcome(tokenizer, item, steps)
    assert (reply.error, reply.finals) == (None, 1)


def test_fault_in_the_thread_ends_what_it_had_in_hand(tokenizer: Tokenizer) -> None:
    first, second = asked(), asked()
    first.request = None  # type: ignore[assignment]
    worker = OutputWorker(tokenizer, lambda item: None)
    worker.put([Begin(first)])
    worker.put([Begin(second)])
    with pytest.raises(AttributeError):
        worker.run()
    replies: list[Any] = [first.reply, second.reply]
    assert [reply.finals for reply in replies] == [1, 1]


class Telling(CollectingReply):
    """Says when a response has come."""

    def __init__(self) -> None:
        super().__init__()
        self.came: queue.SimpleQueue[str] = queue.SimpleQueue()

    def send(self, output: Output, *, final: bool) -> None:
        super().send(output, final=final)
        self.came.put(output.text)


@pytest.fixture
def running(tokenizer: Tokenizer) -> Iterator[OutputWorker]:
    worker = OutputWorker(tokenizer, lambda _: None)
    thread = threading.Thread(target=worker.run)
    thread.start()
    yield worker
    worker.close()
    thread.join(60)


def begun(worker: OutputWorker, tokenizer: Tokenizer) -> tuple[Telling, list[list[Event]], str]:
    """A request whose first response, the text given last, has come; its steps, of which the first has gone in."""
    item = asked()
    item.reply = reply = Telling()
    steps = one_by_one(item, ids_of(tokenizer))
    worker.put([Begin(item)])
    worker.put(steps[0])
    return reply, steps, reply.came.get(timeout=60)


def test_the_first_and_the_last_response_are_not_put_off(
    running: OutputWorker, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outputs, "RESPONSES_PER_S", 1e-3)
    reply, steps, first = begun(running, tokenizer)
    for step in steps[1:]:
        running.put(step)
    reply.wait()
    assert [output.text for output in reply.outputs] == [first, TEXT.removeprefix(first)]


def test_what_was_put_off_goes_out_without_a_further_token(
    running: OutputWorker, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outputs, "RESPONSES_PER_S", 50)
    item, ids = asked(), ids_of(tokenizer)
    item.reply = reply = Telling()
    running.put([Begin(item)])
    for step in one_by_one(item, ids)[:3]:
        running.put(step)
    text = ""
    while len(text) < len(tokenizer.decode(ids[:3])):
        text += reply.came.get(timeout=60)
    assert text == tokenizer.decode(ids[:3])


def test_a_client_that_leaves_is_noticed_while_its_tokens_are_put_off(
    running: OutputWorker, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outputs, "RESPONSES_PER_S", 1e-3)
    reply, steps, _ = begun(running, tokenizer)
    running.put(steps[1])
    reply.cancelled = True
    reply.wait()
    assert isinstance(reply.error, CancelledError)
