"""An audit as a table for people, and as JSON for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from deepstack_serving.audit.arms import Arm
from deepstack_serving.audit.comparison import Answer
from deepstack_serving.audit.verdict import EXIT_CODES, Audit, Check, Pair, Records, Verdict
from deepstack_serving.audit_protocol import ServerDescription
from deepstack_serving.command_line import table

_HEADER = ("check", "answers", "same ids", "first other token", "largest difference", "wanted", "result")


def as_text(audit: Audit, server: ServerDescription, *, pairs: bool) -> str:
    """The table; the single answers of a check where it did not pass, or of all with `pairs`."""
    rows: list[tuple[str, ...]] = [_HEADER]
    for check in audit.checks:
        rows.append(_check_row(check))
        if pairs or check.verdict is not Verdict.PASS:
            rows += [_pair_row(pair) for pair in check.pairs]
    checks = f"{table(rows)}\n" if audit.checks else ""
    reasons = "".join(f"  {reason}\n" for reason in audit.reasons)
    return f"{_head(audit, server)}\n{checks}{audit.verdict}\n{reasons}"


def as_json(audit: Audit, server: ServerDescription, records: Records) -> str:
    """Everything, the answers' ids and log-probabilities among it; null stands for what is infinite."""
    content = {
        "verdict": audit.verdict,
        "exit_code": EXIT_CODES[audit.verdict],
        "reasons": audit.reasons,
        "tolerance": audit.tolerance,
        "server": asdict(server),
        "checks": [_as_document(check) for check in audit.checks],
        "answers": {str(arm): _answers(arm, records) for arm in records},
    }
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def _as_document(check: Check) -> dict[str, Any]:
    pairs = [_pair_document(pair) for pair in check.pairs]
    return {**asdict(check), "pairs": pairs}


def _pair_document(pair: Pair) -> dict[str, Any]:
    difference = asdict(pair.difference)
    finite = {name: None if value == math.inf else value for name, value in difference.items()}
    return {"case": pair.case, "same_ids": pair.difference.first is None, **finite}


def _answers(arm: Arm, records: Records) -> dict[str, Any]:
    def one(answer: Answer) -> Mapping[str, Any]:
        return {
            "prompt_tokens": answer.prompt_tokens,
            "ids": answer.ids,
            "logprobs": [token.logprob for token in answer.tokens],
        }

    return {case: one(answer) for case, answer in records[arm].items()}


def _head(audit: Audit, server: ServerDescription) -> str:
    layers = ", ".join(map(str, server.deepstack_layers)) or "none"
    lines = [f"deepstack layers {layers}; tolerance {audit.tolerance:g} in log-probability where answers may differ"]
    for stage in server.stages:
        compiled = ", compiled" if stage.compiled else ""
        lines.append(f"  {stage.model}: {stage.device}, {stage.dtype}, {stage.execution}{compiled}")
    return "\n".join(lines) + "\n"


def _check_row(check: Check) -> tuple[str, ...]:
    differences = [pair.difference for pair in check.pairs]
    first = min((item.first for item in differences if item.first is not None), default=None)
    same = sum(item.first is None for item in differences)
    largest = max((item.largest for item in differences), default=0.0)
    wanted = f"above {check.bound:g}" if check.rule == "differ" else f"{check.bound:g} at most" if check.bound else "0"
    return (check.title, str(len(differences)), str(same), _place(first), f"{largest:.3g}", wanted, check.verdict)


def _pair_row(pair: Pair) -> tuple[str, ...]:
    item = pair.difference
    same = "yes" if item.first is None else "no"
    return (f"  {pair.case}", "", same, _place(item.first), f"{item.largest:.3g}", "", "")


def _place(first: int | None) -> str:
    return "-" if first is None else str(first)
