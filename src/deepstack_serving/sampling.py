"""Choose the next token of each row of logits: greedy, temperature, top-k, top-p, min-p, each row with its own seed.

Noise is a hash of (seed, draw, token), not a stream: a seeded request draws the same tokens alone and in any batch, on
any device. Sampling is by the Gumbel maximum: argmax(logits / temperature + noise) follows the softmax distribution.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

_GOLDEN = -7046029254386353131  # 2^64 / golden ratio, as a signed number: the increment of the SplitMix64 generator
_MIX_1 = -4658895280553007687  # SplitMix64's two multipliers, likewise
_MIX_2 = -7723592293110705685
_PARTS = 128  # of a single row of logits


@dataclass(frozen=True)
class SamplingTensors:
    """Per row: temperature [rows] (0 is greedy), top_k [rows] (0 is off), top_p, min_p [rows], seed [rows, 2]."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seed: torch.Tensor

    def split(self, rows: int) -> list[SamplingTensors]:
        """So many rows each, as torch.split."""
        parts = [torch.split(getattr(self, field.name), rows) for field in fields(self)]
        return [SamplingTensors(*tensors) for tensors in zip(*parts, strict=True)]


@dataclass(frozen=True)
class Choice:
    """`ids` [rows], -1 where the logits were not finite; `logprobs` [rows], of the unmodified distribution."""

    ids: torch.Tensor
    logprobs: torch.Tensor


def choose(logits: torch.Tensor, sampling: SamplingTensors | None, forced_ids: torch.Tensor | None = None) -> Choice:
    """The next token of each row of logits [rows, vocabulary]; None is greedy, forced_ids [rows] are only scored."""
    logits = logits.float()
    highest, best = _best(logits)
    if forced_ids is not None:
        ids = forced_ids
    elif sampling is None:
        ids = best
    else:
        drawn = (_filtered(logits, sampling) + _gumbel(sampling.seed, logits.shape[-1])).argmax(-1)
        ids = torch.where(sampling.temperature > 0, drawn, best)
    logprobs = logits.gather(-1, ids[:, None])[:, 0] - logits.logsumexp(-1)
    return Choice(torch.where(highest.isfinite(), ids, -1), logprobs)


def _best(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The highest of each row and where it is, both [rows]. Compiled, a row is searched by one program: a single row is
    cut into parts, for programs side by side.
    """
    rows, vocabulary = logits.shape
    if rows != 1 or not torch.compiler.is_compiling():
        best = logits.max(-1)
        return best.values, best.indices
    width = -(-vocabulary // _PARTS)
    padded = torch.nn.functional.pad(logits[0], (0, width * _PARTS - vocabulary), value=-torch.inf)
    of_parts = padded.reshape(_PARTS, width).max(-1)
    highest, part = of_parts.values.max(0, keepdim=True)
    return highest, part * width + of_parts.indices[part]


def choose_by_parts(
    logits: torch.Tensor, sampling: SamplingTensors | None, forced_ids: torch.Tensor | None, rows: int
) -> Choice:
    """`choose`, so many rows at a time: in between it takes many times the memory of the logits."""
    if len(logits) <= rows:
        return choose(logits, sampling, forced_ids)
    parts = torch.split(logits, rows)
    samplings = [None] * len(parts) if sampling is None else sampling.split(rows)
    forced = [None] * len(parts) if forced_ids is None else torch.split(forced_ids, rows)
    choices = [choose(*part) for part in zip(parts, samplings, forced, strict=True)]
    return Choice(torch.cat([choice.ids for choice in choices]), torch.cat([choice.logprobs for choice in choices]))


def top_logprobs(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probabilities, ids) of the `count` most likely tokens, both [rows, count], most likely first."""
    best = logits.float().log_softmax(-1).topk(min(count, logits.shape[-1]), -1)
    return best.values, best.indices


def _filtered(logits: torch.Tensor, sampling: SamplingTensors) -> torch.Tensor:
    """Scaled logits with -inf where a filter removes the token; the most likely token always stays."""
    scaled = logits / sampling.temperature.clamp_min(1e-6)[:, None]
    sorted_logits, order = scaled.sort(-1, descending=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    top_k = torch.where(sampling.top_k > 0, sampling.top_k, logits.shape[-1])[:, None]
    probabilities = sorted_logits.masked_fill(rank >= top_k, -torch.inf).softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    keep = (rank < top_k) & (before < sampling.top_p[:, None])
    keep &= probabilities >= sampling.min_p[:, None] * probabilities[:, :1]
    keep |= rank == 0
    return torch.full_like(scaled, -torch.inf).scatter(-1, order, sorted_logits.masked_fill(~keep, -torch.inf))


def _gumbel(seed: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Standard Gumbel noise [rows, vocabulary] from seed [rows, 2]."""
    row = _mix(_mix(seed[:, 0]) + seed[:, 1] * _GOLDEN)
    token = torch.arange(vocabulary, device=seed.device, dtype=torch.int64) * _GOLDEN
    bits = _mix(row[:, None] + token) >> 11 & (2**53 - 1)
    uniform = (bits.double() + 0.5) * 2.0**-53
    return -(-uniform.log()).log().float()


def _mix(value: torch.Tensor) -> torch.Tensor:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014) in wrapping 64-bit arithmetic."""
    value = (value ^ _shift(value, 30)) * _MIX_1
    value = (value ^ _shift(value, 27)) * _MIX_2
    return value ^ _shift(value, 31)


def _shift(value: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift; torch's >> keeps the sign."""
    return (value >> bits).bitwise_and(2 ** (64 - bits) - 1)
