"""From recorded answers to checks, and from checks to PASS, FAIL or VACUOUS. Pure: nothing is asked here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from deepstack_serving.audit.arms import Arm, Round
from deepstack_serving.audit.cases import Case
from deepstack_serving.audit.comparison import Answer, Difference, compare
from deepstack_serving.audit_protocol import ALL_LAYERS, EAGER, GRAPH, ServerDescription

TOLERANCES = {"FP32": 0.001, "FP16": 0.03, "BF16": 0.25}
CLEARLY = 3  # zeroing must move a log-probability by this many tolerances
Records = Mapping[Arm, Mapping[str, Answer]]


class Verdict(StrEnum):
    """Of a check, or of all: the worst of its checks, FAIL before VACUOUS."""

    PASS = "PASS"
    FAIL = "FAIL"
    VACUOUS = "VACUOUS"


EXIT_CODES = {Verdict.PASS: 0, Verdict.FAIL: 1, Verdict.VACUOUS: 2}


@dataclass(frozen=True)
class Pair:
    """Two answers to one case."""

    case: str
    difference: Difference


@dataclass(frozen=True)
class Check:
    """`bound` is the most that answers may differ, or the least that they must, as `rule` says."""

    title: str
    rule: str
    bound: float
    pairs: tuple[Pair, ...]
    verdict: Verdict
    reason: str = ""


@dataclass(frozen=True)
class Audit:
    """All checks of one run; `reasons` are those of the checks that did not pass, and of what was never tried."""

    checks: tuple[Check, ...]
    reasons: tuple[str, ...]
    verdict: Verdict
    tolerance: float


def judge(records: Records, cases: Sequence[Case], server: ServerDescription, tolerance: float | None = None) -> Audit:
    """`tolerance` (log-probability) None takes the one of the server's number type."""
    bound = TOLERANCES[server.stages[-1].dtype] if tolerance is None else tolerance
    if not server.deepstack_layers:
        return Audit((), ("the checkpoint has no deepstack layers: there is nothing to audit",), Verdict.VACUOUS, bound)
    checks = tuple(_Judge(records, cases, server, bound).checks())
    bad = [check for check in checks if check.verdict is not Verdict.PASS]
    reasons = [f"{check.title}: {check.reason}" for check in bad]
    untried = _untried(records, cases, server)
    verdicts = {*(check.verdict for check in bad), *((Verdict.VACUOUS,) if untried else ())}
    verdict = next((one for one in (Verdict.FAIL, Verdict.VACUOUS) if one in verdicts), Verdict.PASS)
    return Audit(checks, (*reasons, *untried), verdict, bound)


def _untried(records: Records, cases: Sequence[Case], server: ServerDescription) -> tuple[str, ...]:
    """Features enter with a prompt's pictures: if all of these were too long for a graph, no graph had features."""
    if GRAPH not in server.executions:
        return ()
    answers = records[Arm(GRAPH)]
    shortest = min(answers[case.name].prompt_tokens for case in cases if case.pictures)
    if shortest <= server.largest_prefill_graph:
        return ()
    return (
        f"graph: no prompt with a picture ran in a graph: the shortest has {shortest} tokens, the largest graph "
        f"{server.largest_prefill_graph} ('prefill_graph_tokens')",
    )


@dataclass(frozen=True)
class _Judge:
    records: Records
    cases: Sequence[Case]
    server: ServerDescription
    tolerance: float

    def checks(self) -> Iterable[Check]:
        for execution in self.server.executions:
            yield from self._of_one(execution)
        if GRAPH in self.server.executions:
            for zero in self._zeroes:
                yield self._equal(f"graph as eager, {_name(zero)}", Arm(EAGER, zero), Arm(GRAPH, zero), self._between)

    def _of_one(self, execution: str) -> Iterable[Check]:
        exact = self._between if execution == GRAPH else 0.0
        normal, zeroed = Arm(execution), Arm(execution, ALL_LAYERS)
        again = Arm(execution, round=Round.AGAIN)
        yield self._equal(f"{execution}: normal as normal again", normal, again, exact)
        for arm in (normal, zeroed):
            at_once = Arm(execution, arm.zero, Round.AT_ONCE)
            yield self._equal(f"{execution}: {_name(arm.zero)}, at once as alone", arm, at_once, self.tolerance)
        texts = [case for case in self.cases if not case.pictures]
        yield self._equal(f"{execution}: text alone, normal as zeroed", normal, zeroed, exact, texts)
        noise = max(pair.difference.largest for pair in self._pairs(normal, again, self._with_pictures))
        yield self._everything(f"{execution}: normal unlike zeroed", normal, zeroed, noise)
        for layer in map(str, self.server.deepstack_layers):
            yield self._layer(f"{execution}: normal unlike {_name(layer)}", normal, Arm(execution, layer), noise)

    @property
    def _between(self) -> float:
        """What graphs may differ by from eager steps."""
        return self.tolerance if self.server.is_compiled else 0.0

    @property
    def _zeroes(self) -> tuple[str, ...]:
        return ("", ALL_LAYERS, *map(str, self.server.deepstack_layers))

    @property
    def _with_pictures(self) -> list[Case]:
        return [case for case in self.cases if case.pictures]

    def _pairs(self, one: Arm, other: Arm, cases: Sequence[Case] | None = None) -> tuple[Pair, ...]:
        """Of the cases that both arms asked."""
        mine, theirs = self.records[one], self.records[other]
        asked = [case.name for case in cases or self.cases if case.name in mine and case.name in theirs]
        return tuple(Pair(name, compare(mine[name], theirs[name])) for name in asked)

    def _equal(self, title: str, one: Arm, other: Arm, bound: float, cases: Sequence[Case] | None = None) -> Check:
        pairs = self._pairs(one, other, cases)
        wrong = [pair.case for pair in pairs if not pair.difference.within(bound)]
        verdict = Verdict.FAIL if wrong or not pairs else Verdict.PASS
        return Check(title, "same", bound, pairs, verdict, f"answers differ ({'; '.join(wrong)})" if wrong else "")

    def _everything(self, title: str, one: Arm, other: Arm, noise: float) -> Check:
        """Every picture must count for something, and one at least for much."""
        pairs, bound = self._pairs(one, other, self._with_pictures), CLEARLY * self.tolerance
        quiet = [pair.case for pair in pairs if _is_quiet(pair, noise)]
        largest = max(pair.difference.largest for pair in pairs)
        reason = ""
        if quiet:
            reason = f"zeroing all deepstack layers changes nothing ({'; '.join(quiet)})"
        elif largest <= bound:
            reason = (
                f"zeroing all deepstack layers moves log-probabilities by {largest:.3g} at most, not above {bound:g}"
            )
        return Check(title, "differ", bound, pairs, Verdict.VACUOUS if reason else Verdict.PASS, reason)

    def _layer(self, title: str, one: Arm, other: Arm, noise: float) -> Check:
        pairs = self._pairs(one, other)
        quiet = all(_is_quiet(pair, noise) for pair in pairs)
        verdict = Verdict.VACUOUS if quiet else Verdict.PASS
        return Check(title, "differ", noise, pairs, verdict, "zeroing this layer changes nothing" if quiet else "")


def _is_quiet(pair: Pair, noise: float) -> bool:
    return pair.difference.largest <= noise and pair.difference.first is None


def _name(zero: str) -> str:
    return {"": "normal", ALL_LAYERS: "zeroed"}.get(zero, f"ds_{zero} zeroed")
