"""The engine over real stages: how answers end, what fails alone, and that everything comes back."""

from __future__ import annotations

import json
import queue
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from deepstack_serving.checkpoint import open_checkpoint
from deepstack_serving.engine.encoder import Encoder
from deepstack_serving.engine.ports import Output
from deepstack_serving.engine.sequence import Sequence, Status
from deepstack_serving.errors import CancelledError, InvalidRequestError, StageError, UnavailableError
from deepstack_serving.stages.info import StageInfo
from tests.support.asking import MIXED, ONE_IMAGE, TEXT, Answer, Ask, answer, ask_alone, ask_together, picture, submit
from tests.support.local import Change, CollectingReply, LocalServer, keep, local_settings

LONG = {"max_tokens": 60}


def server_of(checkpoint: Path, change: Change = keep, **settings: object) -> LocalServer:
    return LocalServer(local_settings(checkpoint, **settings), 2, change, held=True)


def error_of(reply: CollectingReply) -> BaseException | None:
    return reply.wait().error


@pytest.fixture(scope="module")
def solo(checkpoint: Path) -> list[Answer]:
    with server_of(checkpoint) as server:
        return ask_alone(server, MIXED)


class CancelAtFirstToken(CollectingReply):
    """A client that leaves when the first piece of its answer comes."""

    def send(self, output: Output, *, final: bool) -> None:
        super().send(output, final=final)
        self.cancelled = True


def test_answer_of_one_token(checkpoint: Path, solo: list[Answer]) -> None:
    with server_of(checkpoint) as server:
        server.start()
        reply = submit(server, TEXT, max_tokens=1)
        assert answer(reply).ids == solo[0].ids[:1]
    assert reply.outputs[-1].finish_reason == "length"


def test_end_of_sequence_token_ends_the_answer_and_is_no_text(
    checkpoint: Path, solo: list[Answer], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(checkpoint, tmp_path / "copy"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": solo[0].ids[2]}))
    with server_of(folder) as server:
        server.start()
        reply = submit(server, TEXT, ignore_eos=False)
        assert answer(reply).ids == solo[0].ids[:3]
    tokens = [token["token"] for token in reply.tokens]
    assert (reply.text, reply.outputs[-1].finish_reason) == ("".join(tokens[:2]), "stop")


def test_stop_string_ends_the_answer_before_it(checkpoint: Path) -> None:
    with server_of(checkpoint) as server:
        server.start()
        whole = submit(server, TEXT, **LONG).wait().text
        stopped = submit(server, TEXT, stop=[whole[20:23]], **LONG).wait()
        after = submit(server, TEXT, **LONG).wait().text
    assert stopped.text == whole[: whole.index(whole[20:23])]
    assert (stopped.outputs[-1].finish_reason, after) == ("stop", whole)


def test_streamed_pieces_join_to_the_whole(checkpoint: Path) -> None:
    with server_of(checkpoint) as server:
        server.start()
        whole, streamed = (
            server.submit(
                {"text_input": ["hello"], "stream": [stream], "sampling_parameters": ['{"max_tokens": 100}']}
            ).wait()
            for stream in (False, True)
        )
    assert len(whole.outputs) == 1 < len(streamed.outputs)
    assert streamed.text == whole.text
    assert sum(output.output_tokens for output in streamed.outputs) == whole.outputs[0].output_tokens


def test_each_step_is_one_call_to_each_stage(checkpoint: Path) -> None:
    with server_of(checkpoint, prefill_token_budget=20) as server:
        ask_together(server, MIXED * 2)
        steps, handshake = server.orchestrator.engine.stats.steps, 2
    assert len(server.port.calls) == handshake + 2 * steps


def test_every_reply_ends_once(checkpoint: Path) -> None:
    with server_of(checkpoint) as server:
        replies = [submit(server, ask) for ask in MIXED * 3]
        server.start()
        assert [reply.wait().finals for reply in replies] == [1] * 9


def test_cancelled_in_the_queue(checkpoint: Path, solo: list[Answer]) -> None:
    with server_of(checkpoint, max_running_requests=1) as server:
        running, queued = submit(server, TEXT, **LONG), submit(server, TEXT)
        queued.cancelled = True
        server.start()
        assert isinstance(error_of(queued), CancelledError)
        assert answer(running).ids[:8] == solo[0].ids


def test_cancelled_while_decoding(checkpoint: Path, solo: list[Answer]) -> None:
    with server_of(checkpoint, kv_pool_tokens=256) as server:
        server.start()
        reply = CancelAtFirstToken()
        inputs: dict[str, list[Any]] = {"text_input": ["hello"], "stream": [True]}
        sampling = json.dumps({"max_tokens": 200, "ignore_eos": True})
        server.orchestrator.submit({**inputs, "sampling_parameters": [sampling]}, {}, reply)
        assert isinstance(error_of(reply), CancelledError)
        assert ask_alone(server, [TEXT]) == solo[:1]


def test_refused_more_than_the_pool(checkpoint: Path) -> None:
    with server_of(checkpoint, kv_pool_tokens=64) as server:
        server.start()
        error = error_of(submit(server, TEXT, max_tokens=50))
    assert isinstance(error, InvalidRequestError)
    assert "the whole KV pool holds 64" in str(error)


def test_refused_more_than_the_context_before_anything_runs(checkpoint: Path) -> None:
    with server_of(checkpoint, max_context_length=40) as server:
        reply = submit(server, Ask("compare", (picture(64, 64), picture(130, 66), picture(60, 180))))
        assert isinstance(reply.error, InvalidRequestError)
    assert "images" in str(reply.error)
    assert "40" in str(reply.error)


def test_refused_too_many_images(checkpoint: Path) -> None:
    with server_of(checkpoint, max_images_per_request=1) as server:
        reply = submit(server, Ask("two", (picture(64, 64), picture(64, 64))))
    assert "2 images" in str(reply.error)
    assert "'max_images_per_request'" in str(reply.error)


def test_refused_more_text_than_the_limit_before_it_is_tokenised(checkpoint: Path) -> None:
    with server_of(checkpoint, max_text_bytes=10) as server:
        plain = submit(server, Ask("hell\u00f6 world"))
        parts = [
            {"role": "user", "content": "hello"},
            {"role": "user", "content": [{"type": "text", "text": "world!"}]},
        ]
        chat = server.submit({"messages": [json.dumps(parts)]})
    assert "the request has 12 bytes of text; at most 10" in str(plain.error)
    assert "the request has 11 bytes of text; at most 10" in str(chat.error)


def test_refused_full_queue(checkpoint: Path) -> None:
    with server_of(checkpoint, max_running_requests=1, max_waiting_requests=1) as server:
        replies = [submit(server, TEXT) for _ in range(4)]
        server.start()
        errors = [error_of(reply) for reply in replies]
    assert errors[0] is None
    assert isinstance(errors[-1], UnavailableError)


def test_refused_too_late(checkpoint: Path) -> None:
    with server_of(checkpoint, request_timeout_s=0.001, max_running_requests=1) as server:
        replies = [submit(server, TEXT, **LONG) for _ in range(2)]
        server.start()
        assert all(isinstance(error_of(reply), UnavailableError) for reply in replies)


def test_refused_after_close(checkpoint: Path) -> None:
    with server_of(checkpoint) as server:
        server.start()
        server.orchestrator.close()
        assert isinstance(error_of(submit(server, TEXT)), UnavailableError)


@pytest.mark.parametrize("lost", ["ds_1", "image_embeds"])
def test_ill_fitting_feature_fails_its_request_alone(checkpoint: Path, solo: list[Answer], lost: str) -> None:
    def cut(model: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[:-1] if (model, name) == ("vision_encoder", lost) else tensor

    with LocalServer(local_settings(checkpoint), 2, cut, held=True, refusals=True) as server:
        text, image, other = (submit(server, ask, **LONG) for ask in (TEXT, ONE_IMAGE, TEXT))
        server.start()
        assert "must have the same number of rows" in str(error_of(image))
        assert [answer(reply).ids[:8] for reply in (text, other)] == [solo[0].ids] * 2


def test_stage_that_was_restarted_fails_what_it_had_computed_and_nothing_later(
    checkpoint: Path, solo: list[Answer]
) -> None:
    failed = False

    def restart(model: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
        nonlocal failed
        if model == "language_late" and name == "next_ids" and not failed:
            failed = True
            raise StageError("the stage is gone")
        if model == "language_late" and name == "stage_info" and failed:
            info = StageInfo.from_bytes(bytes(tensor.tolist()))
            return replace(info, instance="another process").to_tensor()
        return tensor

    with server_of(checkpoint, restart) as server:
        replies = [submit(server, TEXT) for _ in range(2)]
        server.start()
        assert [str(error_of(reply)) for reply in replies] == ["the stage is gone"] * 2
        assert ask_alone(server, [TEXT]) == solo[:1]


def test_step_that_fails_once_is_made_up_for(checkpoint: Path, solo: list[Answer]) -> None:
    failures = [StageError("once")]

    def fail_once(model: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if model == "language_late" and name == "next_ids" and failures:
            raise failures.pop()
        return tensor

    with server_of(checkpoint, fail_once) as server:
        answers = ask_together(server, [TEXT, Ask("a"), TEXT])
    assert [answers[0].ids, answers[2].ids] == [solo[0].ids] * 2


def test_encoder_that_gives_another_number_of_tokens_fails_the_request(checkpoint: Path) -> None:
    def miscount(_model: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor + 1 if name == "image_tokens" else tensor

    with server_of(checkpoint, miscount) as server:
        server.start()
        assert "the encoder gave" in str(error_of(submit(server, ONE_IMAGE)))


def test_burst_with_room_for_all_is_served_though_none_may_wait(checkpoint: Path) -> None:
    with server_of(checkpoint, max_waiting_requests=0) as server:
        assert len(ask_together(server, [TEXT] * 4)) == 4


def taken_in(server: LocalServer, monkeypatch: pytest.MonkeyPatch) -> tuple[Sequence, CollectingReply]:
    """A request on the point of being handed to the engine."""
    caught: list[Sequence] = []
    with monkeypatch.context() as patch:
        patch.setattr(server.orchestrator.engine, "submit", caught.append)
        reply = submit(server, ONE_IMAGE)
    return caught[0], reply


def test_client_that_leaves_before_the_engine_has_its_request(
    checkpoint: Path, solo: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    with server_of(checkpoint) as server:
        sequence, reply = taken_in(server, monkeypatch)
        reply.cancelled = True
        server.orchestrator.engine.inbox.put_ended(sequence)
        server.orchestrator.engine.submit(sequence)
        server.start()
        assert isinstance(error_of(reply), CancelledError)
        assert ask_alone(server, [TEXT]) == solo[:1]


def test_client_that_left_before_its_request_was_read(checkpoint: Path) -> None:
    reply = CollectingReply()
    reply.cancelled = True
    with server_of(checkpoint) as server:
        server.orchestrator.submit({"text_input": ["hello"]}, {}, reply)
        assert isinstance(reply.error, CancelledError)


def test_images_of_a_request_that_ended_are_not_encoded(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results: queue.SimpleQueue[object] = queue.SimpleQueue()
    with server_of(checkpoint) as server:
        sequence, _ = taken_in(server, monkeypatch)
        sequence.status = Status.FINISHED
        encoder = Encoder(server.port, open_checkpoint(checkpoint), 1)
        encoder.submit([sequence], lambda _, result: results.put(result))
        assert isinstance(results.get(timeout=20), CancelledError)
        encoder.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_fault_that_nobody_foresaw_ends_every_request_and_says_so(checkpoint: Path) -> None:
    def fault(model: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if (model, name) == ("language_late", "next_ids"):
            raise ZeroDivisionError
        return tensor

    with LocalServer(local_settings(checkpoint), 2, fault, held=True) as server:
        replies = [submit(server, ask) for ask in (TEXT, ONE_IMAGE)]
        server.start()
        errors = [error_of(reply) for reply in replies]
        errors.append(error_of(submit(server, TEXT)))
    assert ["has failed" in str(error) for error in errors] == [True] * 3
