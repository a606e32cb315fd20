"""Sampling parameters: numbers and their texts, the checkpoint's defaults, and refusals by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deepstack_serving.engine.sampling_parameters import SamplingParameters, parse_sampling
from deepstack_serving.errors import InvalidRequestError

DEFAULTS = SamplingParameters(temperature=0.7, top_k=20)


def parse(**values: object) -> SamplingParameters:
    return parse_sampling(json.dumps(values), {}, DEFAULTS)


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        ("max_tokens", 5, 5),
        ("max_tokens", "5", 5),
        ("max_tokens", 5.0, 5),
        ("temperature", "0.5", 0.5),
        ("temperature", 1, 1.0),
        ("top_k", -1, 0),
        ("top_k", 3, 3),
        ("top_p", 0, 0.0),
        ("min_p", "1e-2", 0.01),
        ("min_p", ".5", 0.5),
        ("temperature", "+1.", 1.0),
        ("seed", -(2**63), -(2**63)),
        ("seed", 2**63 - 1, 2**63 - 1),
        ("stop", "end", ("end",)),
        ("stop", ["a", "b"], ("a", "b")),
        ("stop", [], ()),
        ("ignore_eos", "true", True),
        ("ignore_eos", False, False),
        ("logprobs", 20, 20),
    ],
)
def test_value_is_parsed(name: str, given: object, value: object) -> None:
    assert getattr(parse(**{name: given}), name) == value


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("max_tokens", [5]),
        ("max_tokens", "many"),
        ("max_tokens", "1_0"),
        ("max_tokens", "\u0661\u0662"),
        ("max_tokens", " 5"),
        ("temperature", "0_1"),
        ("temperature", "\uff11"),
        ("temperature", "infinity"),
        ("max_tokens", 2**31),
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("temperature", True),
        ("temperature", {}),
        ("top_k", -2),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("seed", 2**63),
        ("stop", ""),
        ("stop", [""]),
        ("stop", [1]),
        ("stop", 5),
        ("stop", ["a"] * 17),
        ("ignore_eos", 1),
        ("ignore_eos", "yes"),
        ("logprobs", 21),
        ("n", 2),
        ("n", "2"),
    ],
)
def test_bad_value_is_refused_by_name(name: str, given: object) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse(**{name: given})
    for part in (repr(name), repr(given), "allowed: "):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "text", ['{"temperature": NaN}', '{"max_tokens": Infinity}', '{"top_p": -Infinity}', '{"seed": 1e400}']
)
def test_number_that_is_not_finite_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="allowed: "):
        parse_sampling(text, {}, DEFAULTS)


def test_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidRequestError, match=r"unknown sampling parameter 'temprature'; known: .*temperature"):
        parse(temprature=1)


@pytest.mark.parametrize("text", ["{", "[1]", "5", "null", "[" * 100_000])
def test_what_is_not_a_json_object_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="'sampling_parameters'"):
        parse_sampling(text, {}, DEFAULTS)


@pytest.mark.parametrize("text", [None, "{}", '{"seed": 1}'])
def test_unknown_request_parameter_is_refused_with_and_without_the_json(text: str | None) -> None:
    with pytest.raises(InvalidRequestError, match=r"unknown request parameter 'top_n'; known: .*temperature"):
        parse_sampling(text, {"top_n": 1}, DEFAULTS)


@pytest.mark.parametrize("text", ["", "{}", '{"temperature": 0}'])
def test_request_parameters_beside_the_json_are_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="'seed', 'temperature' came beside 'sampling_parameters'"):
        parse_sampling(text, {"temperature": 5, "seed": 1}, DEFAULTS)


@pytest.mark.parametrize("values", [{"k" * 100_000: 1}, {"stop": ["stop"] * 100_000}, {"seed": "1" * 100_000}])
def test_refusal_repeats_little_of_what_was_sent(values: dict[str, object]) -> None:
    for text, parameters in ((json.dumps(values), {}), (None, values)):
        with pytest.raises(InvalidRequestError, match=r"\.\.\. \([0-9]{6,} characters\)") as caught:
            parse_sampling(text, parameters, DEFAULTS)
        assert len(str(caught.value)) < 400


@pytest.mark.parametrize("text", ["", " ", "{}"])
def test_empty_text_leaves_the_checkpoints_defaults(text: str) -> None:
    parsed = parse_sampling(text, {}, DEFAULTS)
    assert (parsed.temperature, parsed.top_k) == (0.7, 20)


def test_null_leaves_the_default() -> None:
    assert parse(temperature=None, n=1).temperature == 0.7


def test_request_without_a_seed_gets_one_of_its_own() -> None:
    seeds: list[Any] = [parse().seed for _ in range(3)]
    assert len(set(seeds)) == 3
