"""One step through the language stages: pack the work into tensors, call stage after stage, unpack the new tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from deepstack_serving.engine.burst_calls import BurstCalls, RunningBurst
from deepstack_serving.engine.packing import PackedRows, Packer
from deepstack_serving.engine.ports import Array, Handle, StagePort
from deepstack_serving.engine.scheduler import Work
from deepstack_serving.engine.sequence import EncodedBatch
from deepstack_serving.errors import DeepstackError, StageError
from deepstack_serving.injection import StagePlan
from deepstack_serving.wire import FeatureContract, deepstack_name, feature_inputs, hidden_states, row_bytes


@dataclass(frozen=True)
class PackedStep:
    """All that the stages are sent in one step, or in `steps` decode steps; nothing of it changes afterwards."""

    rows: PackedRows
    features: Mapping[str, Handle]
    steps: int = 1
    group: int = 0

    @property
    def asks_top(self) -> bool:
        """Whether a sequence of this step wants alternatives to its tokens."""
        return "top_count" in self.rows.sampling


@dataclass(frozen=True)
class StepTokens:
    """Token ids and log-probabilities, [sampled rows][steps]; alternatives [steps, sampled rows, most asked for]."""

    ids: list[list[int]]
    logprobs: list[list[float]]
    top_ids: Array | None = None
    top_logprobs: Array | None = None

    @property
    def steps(self) -> int:
        return len(self.ids[0]) if self.ids else 1

    def behind(self, steps: int) -> StepTokens:
        """Without those of the first steps."""
        top = [None if array is None else array[steps:] for array in (self.top_ids, self.top_logprobs)]
        return StepTokens([row[steps:] for row in self.ids], [row[steps:] for row in self.logprobs], *top)

    def top(self, row: int, count: int) -> list[tuple[list[int], list[float]]]:
        """The `count` most likely tokens of each step, ids and log-probabilities."""
        if self.top_ids is None or self.top_logprobs is None:
            raise StageError("the last stage returned no alternatives")
        ids, values = (array[:, row, :count].tolist() for array in (self.top_ids, self.top_logprobs))
        return list(zip(ids, values, strict=True))


class StagePipeline:
    """Walks a list of language stages; knows which features each receives from the stage plans."""

    def __init__(
        self,
        port: StagePort,
        contract: FeatureContract,
        names: Sequence[str],
        plans: Sequence[StagePlan],
        max_rows: int,
        max_sequences: int,
    ) -> None:
        self._port, self.contract, self.names, self.plans = port, contract, tuple(names), tuple(plans)
        self._received = [[spec.name for spec in feature_inputs(contract, plan)] for plan in plans]
        self._packers: dict[int, Packer] = {}
        self._link_sizes = len(names), max_rows, max_sequences, row_bytes(contract)
        self._bursts: dict[int, BurstCalls] = {}

    @property
    def position_axes(self) -> int:
        return self.contract.position_axes

    def close(self) -> None:
        """Give back what bursts hold."""
        for bursts in self._bursts.values():
            bursts.close()

    def bursts(self, group: int = 0) -> BurstCalls:
        """Of a group: steps of several groups may run at once, each with memory of its own to exchange over."""
        if group not in self._bursts:
            self._bursts[group] = BurstCalls(*self._link_sizes)
        return self._bursts[group]

    def pack(self, work: Sequence[Work], steps: int = 1, group: int = 0) -> PackedStep:
        """The step of this work; with several decode steps all of it decodes."""
        if group not in self._packers:
            self._packers[group] = Packer(self.contract.position_axes)
        return PackedStep(self._packers[group].pack(work), self._join_features(work), steps, group)

    def run(self, step: PackedStep) -> StepTokens:
        """The new tokens of a single step, stage after stage. Raises DeepstackError."""
        return self._unpack(step, self._walk(step))

    def can_link(self, step: PackedStep) -> bool:
        """Whether all stages can be called at once: its rows fit, and no stage has to hand features on."""
        forwards = step.features and any(plan.forwarded for plan in self.plans)
        if forwards or len(self.plans) == 1 or not (bursts := self.bursts(step.group)).are_possible():
            return False
        return len(step.rows.input_ids) <= bursts.max_rows

    def begin(self, step: PackedStep) -> RunningBurst:
        """Let the stages run a step, or its decode steps, by themselves."""
        rows = len(step.rows.input_ids)
        call = partial(self._call_in_burst, step)
        return self.bursts(step.group).begin(step.steps, rows, call)

    def finish(self, step: PackedStep, burst: RunningBurst) -> StepTokens:
        """The tokens of all steps that a burst has run, once it is over. Raises DeepstackError."""
        bursts = self.bursts(step.group)
        try:
            tokens = self._unpack(step, burst.result())
        except DeepstackError as error:
            bursts.ended(error)
            raise
        bursts.ended(None)
        return tokens

    def run_linked(self, step: PackedStep) -> StepTokens:
        """The new tokens of a single step of all stages at once. Raises DeepstackError."""
        return self.finish(step, self.begin(step))

    def _walk(self, step: PackedStep) -> Mapping[str, Handle]:
        hidden: Handle = step.rows.input_ids
        features = step.features
        for index, plan in enumerate(self.plans[:-1]):
            inputs = {**step.rows.layout, **self._enter(plan, hidden), **self._features(index, features, step.rows)}
            forwarded = [deepstack_name(layer) for layer in plan.forwarded] if features else []
            outputs = self._port.call(self.names[index], inputs, ["hidden_states", *forwarded])
            hidden = outputs["hidden_states"]
            if forwarded:
                features = {**features, **{key: outputs[key] for key in forwarded}}
        inputs = {**step.rows.layout, **self._enter(self.plans[-1], hidden), **step.rows.sampling}
        return self._port.call(
            self.names[-1], {**inputs, **self._features(-1, features, step.rows)}, self._wanted(step)
        )

    def _call_in_burst(self, step: PackedStep, index: int, more: Mapping[str, Array]) -> Mapping[str, Handle]:
        """One stage's part of a linked call: it has its rows from the stage before it, not from this call."""
        plan = self.plans[index]
        entering = step.rows.input_ids if plan.is_first else self._port.empty(hidden_states(self.contract))
        features = self._features(index, step.features, step.rows)
        inputs = {**step.rows.layout, **self._enter(plan, entering), **features, **more}
        if not plan.is_last:
            return self._port.call(self.names[index], inputs, ["hidden_states"])
        return self._port.call(self.names[index], {**inputs, **step.rows.sampling}, self._wanted(step))

    @staticmethod
    def _wanted(step: PackedStep) -> list[str]:
        return ["next_ids", "logprobs"] + (["top_ids", "top_logprobs"] if step.asks_top else [])

    def _unpack(self, step: PackedStep, results: Mapping[str, Handle]) -> StepTokens:
        arrays = {name: self._port.array(results[name]) for name in self._wanted(step)}
        rows = len(step.rows.sampling["sample_rows"])
        steps = len(arrays["next_ids"]) // rows if rows else 1
        for name, array in arrays.items():
            if len(array) != rows * steps or not 1 <= steps <= step.steps:
                raise StageError(
                    f"the last stage returned {len(array)} rows of {name} for {rows} in {step.steps} steps at most"
                )
        ids, logprobs = (arrays[name].reshape(steps, rows).T.tolist() for name in ("next_ids", "logprobs"))
        if not step.asks_top:
            return StepTokens(ids, logprobs)
        top = (arrays[name].reshape(steps, rows, -1) for name in ("top_ids", "top_logprobs"))
        return StepTokens(ids, logprobs, *top)

    @staticmethod
    def _enter(plan: StagePlan, hidden: Handle) -> dict[str, Handle]:
        return {"input_ids" if plan.is_first else "hidden_states": hidden}

    def _features(self, index: int, features: Mapping[str, Handle], rows: PackedRows) -> dict[str, Handle]:
        names = self._received[index]
        if not features or not names:
            return {}
        return {**rows.feature_layout, **{name: features[name] for name in names}}

    def _join_features(self, work: Sequence[Work]) -> Mapping[str, Handle]:
        batches = list(dict.fromkeys(batch for batch in map(_batch_of, work) if batch is not None))
        if not batches:
            return {}
        return {name: self._port.join(name, [batch.tensors[name] for batch in batches]) for name in batches[0].tensors}


def _batch_of(item: Work) -> EncodedBatch | None:
    features = item.sequence.features
    return features.batch if features is not None and not item.decodes and item.image_rows else None
