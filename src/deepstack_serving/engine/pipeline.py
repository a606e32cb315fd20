"""One step through the language stages: pack the work into tensors, call stage after stage, unpack the new tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from deepstack_serving.engine.packing import pack_rows, pack_sampling
from deepstack_serving.engine.ports import Array, Handle, StagePort, TokenLogprobs
from deepstack_serving.engine.scheduler import Work
from deepstack_serving.errors import StageError
from deepstack_serving.injection import StagePlan
from deepstack_serving.wire import FeatureContract, deepstack_name, feature_inputs

SampledToken = tuple[int, TokenLogprobs]


class StagePipeline:
    """Walks a list of language stages; knows which features each receives from the stage plans."""

    def __init__(
        self, port: StagePort, contract: FeatureContract, names: Sequence[str], plans: Sequence[StagePlan]
    ) -> None:
        self._port, self.contract, self.names, self.plans = port, contract, tuple(names), tuple(plans)

    @property
    def position_axes(self) -> int:
        return self.contract.position_axes

    def run(self, work: Sequence[Work]) -> list[SampledToken | None]:
        """The new token of each piece of work, None where it computed only part of a prompt. Raises DeepstackError."""
        rows = pack_rows(work, self.contract.position_axes)
        features = self._join_features(work)
        hidden: Handle = rows.input_ids
        for name, plan in zip(self.names[:-1], self.plans[:-1], strict=True):
            inputs = {**rows.layout, **self._enter(plan, hidden), **self._features(plan, features, rows.feature_layout)}
            forwarded = [deepstack_name(layer) for layer in plan.forwarded] if features else []
            outputs = self._port.call(name, inputs, ["hidden_states", *forwarded])
            hidden = outputs["hidden_states"]
            features = {**features, **{key: outputs[key] for key in forwarded}}
        return self._last(work, {**rows.layout, **self._enter(self.plans[-1], hidden)}, features, rows.feature_layout)

    def _last(
        self,
        work: Sequence[Work],
        inputs: dict[str, Handle],
        features: Mapping[str, Handle],
        feature_layout: Mapping[str, Handle],
    ) -> list[SampledToken | None]:
        sampling = pack_sampling(work)
        inputs |= {**self._features(self.plans[-1], features, feature_layout), **sampling}
        outputs = ["next_ids", "logprobs"] + (["top_ids", "top_logprobs"] if "top_count" in sampling else [])
        results = self._port.call(self.names[-1], inputs, outputs)
        return self._unpack(work, {name: self._port.array(results[name]) for name in outputs})

    @staticmethod
    def _unpack(work: Sequence[Work], arrays: Mapping[str, Array]) -> list[SampledToken | None]:
        ids, logprobs = arrays["next_ids"].tolist(), arrays["logprobs"].tolist()
        if len(ids) != sum(item.samples for item in work):
            raise StageError(f"the last stage returned {len(ids)} tokens for {sum(item.samples for item in work)} rows")
        places = iter(range(len(ids)))
        tokens: list[SampledToken | None] = []
        for item in work:
            if not item.samples:  # part of a prompt: it has no row in the results
                tokens.append(None)
                continue
            place, count = next(places), item.sequence.request.sampling.logprobs
            top = [arrays[name][place, :count].tolist() if count else () for name in ("top_ids", "top_logprobs")]
            tokens.append((ids[place], TokenLogprobs(logprobs[place], *map(tuple, top))))
        return tokens

    @staticmethod
    def _enter(plan: StagePlan, hidden: Handle) -> dict[str, Handle]:
        return {"input_ids" if plan.is_first else "hidden_states": hidden}

    def _features(
        self, plan: StagePlan, features: Mapping[str, Handle], layout: Mapping[str, Handle]
    ) -> dict[str, Handle]:
        names = [spec.name for spec in feature_inputs(self.contract, plan)]
        if not features or not names:
            return {}
        return {**layout, **{name: features[name] for name in names}}

    def _join_features(self, work: Sequence[Work]) -> Mapping[str, Handle]:
        sources = [item.sequence.features for item in work if _image_rows(item)]
        if not sources:
            return {}
        names = sources[0].tensors if sources[0] else {}
        return {name: self._port.join(name, [source.tensors[name] for source in sources if source]) for name in names}


def _image_rows(item: Work) -> int:
    rows = item.sequence.prompt.image_rows
    return int(np.searchsorted(rows, item.end) - np.searchsorted(rows, item.start)) if item.sequence.in_prefill else 0
