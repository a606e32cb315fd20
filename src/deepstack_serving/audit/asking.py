"""Asks a running server all cases under all arms, and keeps the answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

from deepstack_client import Client, ProtocolError
from deepstack_serving.audit.arms import Arm, Round, arms
from deepstack_serving.audit.cases import AT_ONCE, Case
from deepstack_serving.audit.comparison import Answer, Token
from deepstack_serving.audit.verdict import Records
from deepstack_serving.audit_protocol import AUDIT_DESCRIBE, ServerDescription

ALTERNATIVES = 10  # whose log-probabilities are compared beside the answer's own


def describe(client: Client) -> ServerDescription:
    """How the server's stages compute. Raises ClientError, also where the server refuses an audit."""
    client.generate("Hello", max_tokens=1)  # an ordinary request waits for the stages of a server that has just started
    answer = client.generate("describe", parameters={AUDIT_DESCRIBE: "true"})
    try:
        return ServerDescription.from_json(answer.text)
    except ValueError as error:
        raise ProtocolError(str(error)) from error


def record(
    client: Client, server: ServerDescription, cases: Sequence[Case], max_tokens: int, listener: Callable[[Arm], None]
) -> Records:
    """All answers, by arm and case; `listener` hears of each arm before it is asked. Raises ClientError."""
    records: dict[Arm, Mapping[str, Answer]] = {}
    if not server.deepstack_layers:
        return records
    for arm in arms(server.executions, server.deepstack_layers):
        listener(arm)
        records[arm] = _record(client, arm, arm.cases(cases), max_tokens)
    return records


def _record(client: Client, arm: Arm, cases: Sequence[Case], max_tokens: int) -> dict[str, Answer]:
    def answer(case: Case) -> Answer:
        return _ask(client, case, arm, max_tokens)

    if arm.round is not Round.AT_ONCE:
        return {case.name: answer(case) for case in cases}
    with ThreadPoolExecutor(len(AT_ONCE)) as pool:
        return dict(zip([case.name for case in cases], pool.map(answer, cases), strict=True))


def _ask(client: Client, case: Case, arm: Arm, max_tokens: int) -> Answer:
    completion = client.generate(
        case.prompt,
        case.pictures,
        max_tokens=max_tokens,
        temperature=0.0,
        ignore_eos=True,
        logprobs=ALTERNATIVES,
        parameters=arm.parameters,
    )
    tokens = tuple(_token(cast("Mapping[str, Any]", entry)) for entry in completion.logprobs)
    return Answer(tokens, completion.num_input_tokens)


def _token(entry: Mapping[str, Any]) -> Token:
    try:
        listed = {item["token_id"]: item["logprob"] for item in entry["top_logprobs"]}
        own = entry["token_id"], entry["logprob"]
    except (KeyError, TypeError) as error:
        raise ProtocolError(f"a token of an answer reads {str(entry)[:80]}") from error
    return Token(*own, {**listed, own[0]: own[1]})
