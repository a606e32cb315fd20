"""The audit's verdict on made-up answers: a server that is right, and every way in which one can be wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from deepstack_serving.audit.arms import Arm, Round, arms
from deepstack_serving.audit.cases import Case
from deepstack_serving.audit.comparison import Answer, Token
from deepstack_serving.audit.report import as_json, as_text
from deepstack_serving.audit.verdict import EXIT_CODES, Audit, Records, Verdict, judge
from deepstack_serving.audit_protocol import ALL_LAYERS, EAGER, GRAPH, ServerDescription, StageDescription

LAYERS = (0, 3)
LARGE, SMALL, TEXT = "large picture, long prompt", "small picture, short prompt", "text alone, short"
CASES = (Case(LARGE, "", (b"1",)), Case(SMALL, "", (b"2",)), Case(TEXT, ""))
PROMPT_TOKENS = {LARGE: 200, SMALL: 70, TEXT: 20}
TOLERANCE = 0.01
TINY = 1e-6

Effect = Callable[[Arm, str, float], float]  # what a fault makes of the features' sum in one answer


def right(_arm: Arm, _case: str, features: float) -> float:
    return features


def server(*, graphs: bool = True, compiled: bool = False, largest: int = 256) -> ServerDescription:
    vision = StageDescription("vision_encoder", "cuda:0", "FP32", EAGER, False)
    language = StageDescription("language", "cuda:0", "FP32", GRAPH if graphs else EAGER, compiled)
    return ServerDescription(LAYERS, largest, (vision, language))


def answer(features: float, case: str) -> Answer:
    """Four tokens whose log-probabilities follow the features; the third is another one when these are large."""
    own = -0.5 + features / 10
    tokens = [Token(place, own - place, {place: own - place, 9: -4.0}) for place in range(4)]
    if features > 0.5:
        tokens[2] = Token(9, own - 2, {9: own - 2, 2: -4.0})
    return Answer(tuple(tokens), PROMPT_TOKENS[case])


def record(described: ServerDescription, effect: Effect = right) -> Records:
    """What a server with one fault answers. A picture's features count 1 for each of the two layers."""

    def one(arm: Arm, case: Case) -> Answer:
        on = [layer for layer in LAYERS if arm.zero not in (ALL_LAYERS, str(layer))]
        return answer(effect(arm, case.name, float(len(on)) if case.pictures else 0.0), case.name)

    asked = arms(described.executions, LAYERS)
    return {arm: {case.name: one(arm, case) for case in arm.cases(CASES)} for arm in asked}


def audit(effect: Effect = right, described: ServerDescription | None = None, tolerance: float = TOLERANCE) -> Audit:
    described = described or server()
    return judge(record(described, effect), CASES, described, tolerance)


def only(condition: Callable[[Arm, str], bool], change: Callable[[float], float]) -> Effect:
    """A fault in some answers."""
    return lambda arm, case, features: change(features) if condition(arm, case) else features


def in_graph(arm: Arm, _case: str) -> bool:
    return arm.execution == GRAPH


def without_layer_3(arm: Arm, case: str, features: float) -> float:
    """Layer 3 never arrives, whatever is zeroed."""
    return features if case == TEXT or arm.zero in (ALL_LAYERS, "3") else features - 1


def stale(arm: Arm, case: str) -> bool:
    return in_graph(arm, case) and case != LARGE


def beyond_the_slot(arm: Arm, case: str) -> bool:
    return in_graph(arm, case) and case == LARGE


FAULTS: dict[str, tuple[Effect, Verdict, str]] = {
    "stale tail: a shorter request keeps something of the longer one": (
        only(stale, lambda features: features + 0.3),
        Verdict.FAIL,
        f"graph as eager, normal: answers differ ({SMALL}; {TEXT})",
    ),
    "slot kept: text after a picture has its features": (
        only(lambda arm, case: in_graph(arm, case) and case == TEXT and not arm.zero, lambda _: 2.0),
        Verdict.FAIL,
        f"graph: text alone, normal as zeroed: answers differ ({TEXT})",
    ),
    "dropped add: the graph adds no features": (
        only(in_graph, lambda _: 0.0),
        Verdict.FAIL,
        f"graph as eager, normal: answers differ ({LARGE}; {SMALL})",
    ),
    "dropped add of one layer in the graph": (
        lambda arm, case, features: without_layer_3(arm, case, features) if in_graph(arm, case) else features,
        Verdict.FAIL,
        "graph: normal unlike ds_3 zeroed: zeroing this layer changes nothing",
    ),
    "dropped add everywhere": (lambda *_: 0.0, Verdict.VACUOUS, f"changes nothing ({LARGE}; {SMALL})"),
    "zeroed on mismatch: what does not fit the slot counts as nothing": (
        only(beyond_the_slot, lambda _: 0.0),
        Verdict.FAIL,
        f"graph as eager, normal: answers differ ({LARGE})",
    ),
    "zeroed on mismatch, eagerly too": (
        only(lambda _, case: case == LARGE, lambda _: 0.0),
        Verdict.VACUOUS,
        f"eager: normal unlike zeroed: zeroing all deepstack layers changes nothing ({LARGE})",
    ),
    "view instead of copy: forwarded features are cleared before they are sent": (
        without_layer_3,
        Verdict.VACUOUS,
        "eager: normal unlike ds_3 zeroed: zeroing this layer changes nothing",
    ),
    "view instead of copy: outputs change with a later request": (
        only(lambda arm, case: arm == Arm(GRAPH, round=Round.AGAIN) and case == SMALL, lambda features: features + 0.1),
        Verdict.FAIL,
        f"graph: normal as normal again: answers differ ({SMALL})",
    ),
    "rows of two requests mixed": (
        only(lambda arm, case: arm.round is Round.AT_ONCE and case == LARGE, lambda _: 0.2),
        Verdict.FAIL,
        f"eager: normal, at once as alone: answers differ ({LARGE})",
    ),
    "last bits of a graph without compiled layers": (
        only(in_graph, lambda features: features + TINY),
        Verdict.FAIL,
        "graph as eager, normal",
    ),
    "features hardly count": (
        lambda _arm, _case, features: features * TOLERANCE,
        Verdict.VACUOUS,
        "moves log-probabilities by 0.002 at most, not above 0.03",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_found(name: str) -> None:
    effect, verdict, reason = FAULTS[name]
    found = audit(effect)
    assert found.verdict is verdict
    assert any(reason in text for text in found.reasons), found.reasons


@pytest.mark.parametrize("described", [server(), server(compiled=True), server(graphs=False)])
def test_right_server_passes(described: ServerDescription) -> None:
    found = audit(described=described)
    assert (found.verdict, found.reasons, EXIT_CODES[found.verdict]) == (Verdict.PASS, (), 0)


def test_exit_codes_tell_the_verdicts_apart() -> None:
    assert EXIT_CODES == {Verdict.PASS: 0, Verdict.FAIL: 1, Verdict.VACUOUS: 2}


def test_all_arms_are_compared() -> None:
    titles = [check.title for check in audit().checks]
    for execution in (EAGER, GRAPH):
        for kind in ("normal as normal again", "normal unlike zeroed", "normal unlike ds_0 zeroed"):
            assert f"{execution}: {kind}" in titles
    assert [title for title in titles if title.startswith("graph as eager")] == [
        f"graph as eager, {kind}" for kind in ("normal", "zeroed", "ds_0 zeroed", "ds_3 zeroed")
    ]


def test_cpu_has_eager_checks_only() -> None:
    assert all(check.title.startswith("eager: ") for check in audit(described=server(graphs=False)).checks)


def test_compiled_graphs_may_differ_within_the_tolerance() -> None:
    def close(arm: Arm, case: str, features: float) -> float:
        return features + 0.09 if in_graph(arm, case) else features  # a tenth of it in log-probability

    assert audit(close, server(compiled=True)).verdict is Verdict.PASS
    assert audit(close, server(compiled=True), tolerance=0.008).verdict is Verdict.FAIL
    assert audit(close, server()).verdict is Verdict.FAIL


def with_tie(parted: Callable[[Arm], bool], gap: float) -> Records:
    """Answers to the text of which those of some arms begin with the other one of two tokens that are `gap` apart."""
    tokens = {True: Token(6, -1.0, {6: -1.0, 5: -1.0 - gap}), False: Token(5, -1.0, {5: -1.0, 6: -1.0 - gap})}
    return {
        arm: {**answers, **({TEXT: Answer((tokens[parted(arm)],))} if TEXT in answers else {})}
        for arm, answers in record(server(compiled=True)).items()
    }


@pytest.mark.parametrize(("gap", "verdict"), [(0.5 * TOLERANCE, Verdict.PASS), (2 * TOLERANCE, Verdict.FAIL)])
@pytest.mark.parametrize("parted", [lambda arm: arm.execution == GRAPH, lambda arm: arm.round is Round.AT_ONCE])
def test_only_near_ties_may_change_places(parted: Callable[[Arm], bool], gap: float, verdict: Verdict) -> None:
    found = judge(with_tie(parted, gap), CASES, server(compiled=True), TOLERANCE)
    assert found.verdict is verdict, found.reasons


def test_answer_of_another_length_is_another_answer() -> None:
    records = {key: dict(answers) for key, answers in record(server()).items()}
    whole = records[Arm(GRAPH)][SMALL]
    records[Arm(GRAPH)][SMALL] = replace(whole, tokens=whole.tokens[:2])
    assert judge(records, CASES, server(), TOLERANCE).verdict is Verdict.FAIL


def test_failure_outweighs_emptiness() -> None:
    def both(arm: Arm, case: str, _: float) -> float:
        return float(arm.round is Round.AGAIN and case == TEXT)

    found = audit(both)
    assert found.verdict is Verdict.FAIL
    assert any("changes nothing" in reason for reason in found.reasons)


def test_checkpoint_without_deepstack_is_vacuous() -> None:
    found = judge({}, CASES, replace(server(), deepstack_layers=()))
    assert found.verdict is Verdict.VACUOUS
    assert found.reasons == ("the checkpoint has no deepstack layers: there is nothing to audit",)


@pytest.mark.parametrize(("largest", "verdict"), [(70, Verdict.PASS), (69, Verdict.VACUOUS), (0, Verdict.VACUOUS)])
def test_graphs_that_no_picture_entered_prove_nothing(largest: int, verdict: Verdict) -> None:
    found = audit(described=server(largest=largest))
    assert found.verdict is verdict
    assert ("no prompt with a picture ran in a graph" in "".join(found.reasons)) is (verdict is Verdict.VACUOUS)


def test_tolerance_follows_the_number_type() -> None:
    described = server(graphs=False)
    half = replace(described, stages=tuple(replace(stage, dtype="BF16") for stage in described.stages))
    assert judge(record(described), CASES, described).tolerance < judge(record(half), CASES, half).tolerance


def test_report_says_what_failed_with_its_pairs() -> None:
    text = as_text(audit(FAULTS["dropped add everywhere"][0]), server(), pairs=False)
    assert "\nVACUOUS\n  eager: normal unlike zeroed: zeroing all deepstack layers changes nothing" in text
    assert f"  {LARGE}" in text
    assert f"  {LARGE}" not in as_text(audit(), server(), pairs=False)
    assert f"  {LARGE}" in as_text(audit(), server(), pairs=True)


def test_json_has_everything_in_plain_numbers() -> None:
    found = audit(FAULTS["rows of two requests mixed"][0])
    document = json.loads(as_json(found, server(), record(server())), parse_constant=pytest.fail)
    assert (document["verdict"], document["exit_code"]) == ("FAIL", 1)
    [check] = [item for item in document["checks"] if item["title"] == "eager: normal, at once as alone"]
    assert (check["pairs"][0]["case"], check["pairs"][0]["same_ids"]) == (LARGE, False)
    assert document["answers"]["graph, normal, alone"][LARGE]["ids"] == [0, 1, 9, 3]


def test_description_crosses_as_json() -> None:
    assert ServerDescription.from_json(server().to_json()) == server()


@pytest.mark.parametrize("text", ["", "hello", "[]", "{}", '{"stages": [{"model": 1}]}'])
def test_other_texts_are_no_description(text: str) -> None:
    with pytest.raises(ValueError):
        ServerDescription.from_json(text)
