"""What the audit sends and how it reads the answers, without a server."""

from __future__ import annotations

import json

import pytest

from deepstack_client import Client, ProtocolError
from deepstack_client.testing import FakeTransport, Step, answer, piece
from deepstack_serving.audit.arms import Arm, Round, arms
from deepstack_serving.audit.asking import describe, record
from deepstack_serving.audit.cases import AT_ONCE, cases
from deepstack_serving.audit.comparison import Answer, Token
from deepstack_serving.audit_protocol import ALL_LAYERS, EAGER, GRAPH, ServerDescription, StageDescription

STAGES = (StageDescription("vision_encoder", "cpu", "FP32", EAGER, False),)
STAGES += (StageDescription("language", "cpu", "FP32", EAGER, False),)
CPU = ServerDescription((0, 1), 2048, STAGES)
TOKENS = [{"token_id": 7, "logprob": -0.5, "top_logprobs": [{"token_id": 8, "logprob": -1.0, "token": "x"}]}]


def answered(tokens: object = TOKENS) -> list[Step]:
    return [piece("x", finish_reason="length", logprobs=json.dumps(tokens))]


def test_description_is_asked_for_once_the_server_answers() -> None:
    fake = FakeTransport(answer("ordinary"), answer(CPU.to_json()))
    assert describe(Client(transport=fake)) == CPU
    assert [dict(call.request.parameters) for call in fake.calls] == [{}, {"audit_describe": "true"}]


def test_server_that_answers_the_question_instead_is_not_understood() -> None:
    with pytest.raises(ProtocolError, match="does not describe a server"):
        describe(Client(transport=FakeTransport(answer("ordinary"), answer("a picture"))))


def test_every_arm_asks_its_cases_under_its_parameters() -> None:
    asked = [(arm, case) for arm in arms(CPU.executions, CPU.deepstack_layers) for case in arm.cases(cases())]
    fake = FakeTransport(*(answered() for _ in asked))
    records = record(Client(transport=fake), CPU, cases(), 4, lambda _: None)
    assert [dict(call.request.parameters) for call in fake.calls] == [arm.parameters for arm, _ in asked]
    assert [(arm, case) for arm, answers in records.items() for case in answers] == [(a, c.name) for a, c in asked]
    expected = Answer((Token(7, -0.5, {7: -0.5, 8: -1.0}),), prompt_tokens=1)
    assert all(found == expected for answers in records.values() for found in answers.values())


def test_checkpoint_without_deepstack_is_not_asked() -> None:
    fake = FakeTransport()
    assert record(Client(transport=fake), ServerDescription((), 0, STAGES), cases(), 4, lambda _: None) == {}
    assert fake.calls == []


@pytest.mark.parametrize("tokens", [[{"token_id": 7}], [5], [{"token_id": 7, "logprob": 0, "top_logprobs": [1]}]])
def test_tokens_without_log_probabilities_are_not_understood(tokens: object) -> None:
    with pytest.raises(ProtocolError, match="a token of an answer reads"):
        record(Client(transport=FakeTransport(answered(tokens))), CPU, cases(), 4, lambda _: None)


def test_arms_are_those_of_all_executions_with_normal_again_at_the_end() -> None:
    found = arms((EAGER, GRAPH), (3,))
    assert set(found) == {
        Arm(execution, zero, kind)
        for execution in (EAGER, GRAPH)
        for zero, kind in (
            ("", Round.ALONE),
            (ALL_LAYERS, Round.ALONE),
            ("", Round.AT_ONCE),
            (ALL_LAYERS, Round.AT_ONCE),
            ("3", Round.ALONE),
            ("", Round.AGAIN),
        )
    }
    assert [arm.round for arm in found[-2:]] == [Round.AGAIN, Round.AGAIN]


def test_cases_go_from_long_to_short_to_text_and_share_no_picture() -> None:
    pictures = [picture for case in cases() for picture in case.pictures]
    assert len(set(pictures)) == len(pictures)
    assert [bool(case.pictures) for case in cases()[:4]] == [True, True, False, True]
    assert len(cases()[0].prompt) > len(cases()[1].prompt)
    assert {len(case.pictures) for case in cases()} == {0, 1, 2}
    assert set(AT_ONCE) < {case.name for case in cases()}
