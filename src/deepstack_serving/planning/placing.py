"""Which GPU each model sits on, and the split points that load these GPUs evenly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from deepstack_serving.errors import SettingsError
from deepstack_serving.planning.sizes import Parts

_Cost = tuple[float, float]  # the fullest GPU, then the sum of squares: smaller is more even
_EMPTY: _Cost = (0.0, 0.0)


@dataclass(frozen=True)
class Placement:
    """GPU numbers of the vision encoder and of each language stage, ascending."""

    vision: int
    stages: tuple[int, ...]


def place(stage_count: int, gpu_count: int) -> Placement:
    """Stages in order over the GPUs; the vision encoder on the first one, alone where there is a GPU more than stages.

    Raises SettingsError when there are more GPUs than models.
    """
    if not 1 <= gpu_count <= stage_count + 1:
        raise SettingsError(
            f"{gpu_count} GPUs are named; allowed for {stage_count} language stages: 1 to {stage_count + 1}"
        )
    if gpu_count > stage_count:
        return Placement(0, tuple(range(1, gpu_count)))
    return Placement(0, tuple(index * gpu_count // stage_count for index in range(stage_count)))


def suggest_split(parts: Parts, placement: Placement, memory_bytes: Sequence[float]) -> tuple[int, ...]:
    """The split points with the lowest share of memory on the fullest GPU; equal layers where stages share one."""
    gpus = sorted(set(placement.stages))
    stages = [placement.stages.count(gpu) for gpu in gpus]
    ends = _group_ends(
        parts, stages, [_fixed_bytes(parts, placement, gpu) for gpu in gpus], [memory_bytes[gpu] for gpu in gpus]
    )
    points, start = [], 0
    for count, end in zip(stages, ends, strict=True):
        points += [start + (end - start) * (index + 1) // count for index in range(count)]
        start = end
    return tuple(points[:-1])


def _fixed_bytes(parts: Parts, placement: Placement, gpu: int) -> int:
    """What a GPU holds wherever the layers are cut."""
    fixed = parts.every * placement.stages.count(gpu)
    fixed += parts.vision * (placement.vision == gpu)
    fixed += parts.first * (placement.stages[0] == gpu)
    return fixed + parts.last * (placement.stages[-1] == gpu)


def _group_ends(
    parts: Parts, stages: Sequence[int], fixed: Sequence[int], memory_bytes: Sequence[float]
) -> tuple[int, ...]:
    """Where the layers of each GPU end: the best way to give n layers to the first GPUs, one GPU more at a time."""
    count = len(parts.layers)
    before = list(accumulate(parts.layers, initial=0))
    least = [min(wanted, count // sum(stages) * wanted) for wanted in stages]  # no empty stage where layers suffice
    best: dict[int, tuple[_Cost, tuple[int, ...]]] = {0: (_EMPTY, ())}
    for gpu, minimum in enumerate(least):
        reached: dict[int, tuple[_Cost, tuple[int, ...]]] = {}
        for start, (cost, ends) in best.items():
            for end in range(start + minimum, count + 1):
                share = (fixed[gpu] + before[end] - before[start]) / memory_bytes[gpu]
                candidate = ((max(cost[0], share), cost[1] + share**2), (*ends, end))
                if end not in reached or candidate < reached[end]:
                    reached[end] = candidate
        best = reached
    return best[count][1]
