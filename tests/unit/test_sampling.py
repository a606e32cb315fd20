"""Choosing tokens: distributions by counting, filters, seeds, forced ids, and logits that are not finite."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepstack_serving.sampling import SamplingTensors, choose, choose_by_parts, top_logprobs

DRAWS = 20_000
LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, -2.0])


def parameters(rows: int, **values: Any) -> SamplingTensors:
    """The same for every row but the seed: row i is draw i of seed 7."""
    chosen = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **values}
    seed = torch.stack([torch.full((rows,), 7), torch.arange(rows)], 1)
    columns = {name: torch.full((rows,), value) for name, value in chosen.items()}
    return SamplingTensors(**{**columns, "seed": seed})


def frequencies(logits: torch.Tensor, **values: Any) -> torch.Tensor:
    ids = choose(logits.expand(DRAWS, -1), parameters(DRAWS, **values)).ids
    return torch.bincount(ids, minlength=len(logits)) / DRAWS


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    expected = (LOGITS / temperature).softmax(0)
    torch.testing.assert_close(frequencies(LOGITS, temperature=temperature), expected, atol=0.015, rtol=0)


def test_draws_of_other_seeds_follow_the_softmax_too() -> None:
    sampling = parameters(DRAWS)
    sampling.seed[:, 0], sampling.seed[:, 1] = torch.arange(DRAWS), 0
    counts = torch.bincount(choose(LOGITS.expand(DRAWS, -1), sampling).ids, minlength=5) / DRAWS
    torch.testing.assert_close(counts, LOGITS.softmax(0), atol=0.015, rtol=0)


def test_neighbouring_draws_are_independent() -> None:
    ids = choose(torch.zeros(DRAWS, 2), parameters(DRAWS)).ids
    assert abs(float((ids[1:] == ids[:-1]).float().mean()) - 0.5) < 0.015


def test_top_k_keeps_the_k_most_likely_in_their_proportion() -> None:
    expected = torch.cat([LOGITS[:2].softmax(0), torch.zeros(3)])
    torch.testing.assert_close(frequencies(LOGITS, top_k=2), expected, atol=0.015, rtol=0)


@pytest.mark.parametrize(("top_p", "kept"), [(0.0, 1), (0.6, 1), (0.7, 2), (0.9, 3), (1.0, 5)])
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, kept: int) -> None:
    assert int((frequencies(LOGITS, top_p=top_p) > 0).sum()) == kept  # cumulated: 0.64, 0.87, 0.96, 0.99, 1


@pytest.mark.parametrize(("min_p", "kept"), [(0.0, 5), (0.1, 3), (0.3, 2), (0.5, 1), (1.0, 1)])
def test_min_p_keeps_what_is_likely_enough_beside_the_best(min_p: float, kept: int) -> None:
    assert int((frequencies(LOGITS, min_p=min_p) > 0).sum()) == kept  # beside the best: 0.37, 0.14, 0.05, 0.02


def test_top_k_of_one_is_greedy() -> None:
    logits = torch.randn(50, 30, generator=torch.Generator().manual_seed(0))
    ids = choose(logits, parameters(50, temperature=9.0, top_k=1)).ids
    assert torch.equal(ids, logits.argmax(-1))


def test_rows_of_temperature_zero_are_greedy_among_sampled_ones() -> None:
    logits = torch.randn(50, 30, generator=torch.Generator().manual_seed(0))
    sampling = parameters(50, temperature=50.0)
    sampling.temperature[::2] = 0.0
    ids = choose(logits, sampling).ids
    assert torch.equal(ids[::2], logits.argmax(-1)[::2])
    assert not torch.equal(ids[1::2], logits.argmax(-1)[1::2])


def test_near_tie_at_temperature_zero_is_not_decided_by_noise() -> None:
    ids = choose(torch.tensor([0.0, 1e-7]).expand(200, -1), parameters(200, temperature=0.0)).ids
    assert ids.unique().tolist() == [1]


def test_smallest_temperature_is_nearly_greedy() -> None:
    assert frequencies(LOGITS, temperature=1e-30)[0] == 1


def test_row_draws_the_same_in_any_place_of_any_batch() -> None:
    logits = torch.randn(8, 30, generator=torch.Generator().manual_seed(0))
    together = parameters(8, temperature=2.0)
    order = torch.tensor([5, 2, 7, 0, 1, 6, 3, 4])
    shuffled = SamplingTensors(*(getattr(together, name)[order] for name in SamplingTensors.__dataclass_fields__))
    single = SamplingTensors(*(getattr(together, name)[5:6] for name in SamplingTensors.__dataclass_fields__))
    ids = choose(logits, together).ids
    assert torch.equal(choose(logits[order], shuffled).ids, ids[order])
    assert choose(logits[5:6], single).ids.tolist() == [int(ids[5])]


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63)])
def test_any_seed_draws_from_the_whole_distribution(seed: int) -> None:
    sampling = parameters(2000)
    sampling.seed[:, 0] = seed
    counts = torch.bincount(choose(torch.zeros(2000, 4), sampling).ids, minlength=4) / 2000
    torch.testing.assert_close(counts, torch.full((4,), 0.25), atol=0.05, rtol=0)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("sampled", [False, True])
def test_row_that_is_not_finite_gives_minus_one_and_no_other_row(bad: float, sampled: bool) -> None:
    logits = LOGITS.repeat(3, 1)
    logits[1, 3] = bad
    ids = choose(logits, parameters(3, top_k=1) if sampled else None).ids
    assert ids.tolist() == [0, -1, 0]


def test_row_without_any_likely_token_gives_minus_one() -> None:
    assert choose(torch.full((1, 4), -torch.inf), None).ids.tolist() == [-1]


def test_logprobs_are_those_of_the_unmodified_distribution() -> None:
    choice = choose(LOGITS[None], parameters(1, temperature=0.1, top_k=1))
    torch.testing.assert_close(choice.logprobs, LOGITS.log_softmax(0)[:1])


def test_forced_ids_are_scored_not_replaced() -> None:
    choice = choose(LOGITS.repeat(2, 1), parameters(2), torch.tensor([4, 2]))
    assert choice.ids.tolist() == [4, 2]
    torch.testing.assert_close(choice.logprobs, LOGITS.log_softmax(0)[[4, 2]])


def test_top_logprobs_come_best_first() -> None:
    values, ids = top_logprobs(LOGITS.flip(0)[None], 2)
    assert ids.tolist() == [[4, 3]]
    torch.testing.assert_close(values[0], LOGITS.log_softmax(0)[:2])


def test_more_alternatives_than_tokens_are_all_tokens() -> None:
    assert top_logprobs(LOGITS[None], 64)[1].shape == (1, 5)


def test_half_precision_logits_are_scored_in_fp32() -> None:
    assert choose(LOGITS[None].bfloat16(), None).logprobs.dtype == torch.float32


@pytest.mark.parametrize("kind", ["greedy", "sampled", "forced"])
@pytest.mark.parametrize("rows", [1, 3, 7, 100])
def test_parts_give_what_all_rows_together_give(kind: str, rows: int) -> None:
    logits = torch.randn(7, 50, generator=torch.Generator().manual_seed(3))
    sampling = parameters(7, top_k=20, top_p=0.9) if kind == "sampled" else None
    forced = torch.arange(7) if kind == "forced" else None
    whole, parts = choose(logits, sampling, forced), choose_by_parts(logits, sampling, forced, rows)
    assert torch.equal(parts.ids, whole.ids)
    assert torch.equal(parts.logprobs, whole.logprobs)


def test_no_rows_have_no_parts() -> None:
    choice = choose_by_parts(torch.zeros(0, 5), None, None, 4)
    assert (len(choice.ids), len(choice.logprobs)) == (0, 0)


@pytest.mark.parametrize("vocabulary", [7, 128, 129, 1000, 151_936])
@pytest.mark.parametrize("case", ["random", "tie", "nan", "infinite"])
def test_a_single_row_is_chosen_alike_in_compiled_code(vocabulary: int, case: str) -> None:
    """There it is searched in parts."""
    logits = torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(vocabulary)).bfloat16()
    middle = vocabulary // 3
    if case == "tie":
        logits[0, [middle, -1]] = 50.0
    elif case == "nan":
        logits[0, middle] = torch.nan
    elif case == "infinite":
        logits[:] = -torch.inf
    compiled = torch.compile(choose, backend="eager", dynamic=False)(logits, None)
    plain = choose(logits, None)
    assert compiled.ids.tolist() == plain.ids.tolist() == ([-1] if case in ("nan", "infinite") else [logits.argmax()])
    assert torch.equal(compiled.logprobs.isnan(), plain.logprobs.isnan())
    assert case in ("nan", "infinite") or torch.equal(compiled.logprobs, plain.logprobs)


def test_no_row_is_chosen_alike_in_compiled_code() -> None:
    compiled = torch.compile(choose, backend="eager", dynamic=False)(torch.zeros(0, 300), None)
    assert compiled.ids.shape == compiled.logprobs.shape == (0,)
