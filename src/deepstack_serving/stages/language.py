"""One language stage: a range of decoder layers, with the embedding in front or the head behind where it owns them.

A call's way: check (call.py), lay out (layout.py), embed or take over hidden states, layers with their deepstack
features, then hidden states and later layers' features out, or logits and the next tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch

from deepstack_serving.attention import ATTENTION
from deepstack_serving.checkpoint import Checkpoint
from deepstack_serving.errors import SettingsError, WireError
from deepstack_serving.exchange import ExchangeDoor
from deepstack_serving.execution.features import StepFeatures
from deepstack_serving.execution.layers import DecoderLayers
from deepstack_serving.execution.recorder import CudaRecorder, Recorder
from deepstack_serving.execution.runner import Ends
from deepstack_serving.injection import StagePlan
from deepstack_serving.kv_pool import KVPool, blocks_for_memory, kv_shape
from deepstack_serving.sampling import SamplingTensors, choose, choose_by_parts, top_logprobs
from deepstack_serving.settings import Settings
from deepstack_serving.stages.burst import run_burst
from deepstack_serving.stages.call import LanguageCall, Tensors, check_placeholders, check_token_ids, parse_call
from deepstack_serving.stages.cpu_threads import limit_cpu_threads
from deepstack_serving.stages.device import layers_on, stage_device
from deepstack_serving.stages.info import StageInfo
from deepstack_serving.stages.layout import packed_step, step_rows
from deepstack_serving.stages.loading import load_language_stage
from deepstack_serving.stages.running import check_execution, make_runner, start_graphs, step_sizes
from deepstack_serving.wire import (
    SAMPLING,
    STAGE_INFO,
    TOP_IDS,
    TOP_LOGPROBS,
    deepstack_name,
    language_interface,
    row_bytes,
)

CPU_POOL_TOKENS = 32_768
MAX_TOP_COUNT = 64
PROMPT_ROWS_AT_ONCE = 16  # whose tokens are chosen in one go after a step that computed prompts

ImageRows = tuple[torch.Tensor, torch.Tensor]  # packed rows with image features, and those features' rows


class LanguageStage:
    """Loads its own weights and owns the KV pool of its layers.

    `names` are the language stages of its pipeline, `pipelines` those of all: they may share a GPU's memory.
    """

    def __init__(
        self,
        settings: Settings,
        checkpoint: Checkpoint,
        plans: tuple[StagePlan, ...],
        names: tuple[str, ...],
        index: int,
        pipelines: Sequence[tuple[str, ...]] = (),
    ):
        self.plan = plans[index]
        self.contract = checkpoint.contract
        self.interface = language_interface(self.contract, self.plan)
        self.device = stage_device(settings, names[index])
        check_execution(settings, self.device)
        limit_cpu_threads(settings, self.device)
        self._family = checkpoint.family
        self._placeholder_ids = self._family.placeholder_ids(checkpoint.config)
        self._vocabulary = int(checkpoint.config.text_config.vocab_size)
        self._model = load_language_stage(checkpoint, self.plan, self.device, ATTENTION)
        self._pool = self._make_pool(settings, checkpoint, plans, pipelines or (names,))
        self._settings = settings
        self.runs_paged = on_gpu = self.device != "cpu"
        self._door = ExchangeDoor(self.plan.index, self.plan.count, row_bytes(self.contract), on_gpu=on_gpu)
        self._layers = DecoderLayers(self._family, self._model, self.plan)
        sizes = step_sizes(settings, self._pool, checkpoint.max_position_embeddings)
        ends = Ends(self._embed if self.plan.is_first else None, self._head if self.plan.is_last else None)
        self.runner = make_runner(settings, self._layers, self._pool, sizes, ends)
        self.info = StageInfo(
            names[index],
            checkpoint.fingerprint,
            self.contract.dtype,
            self.device,
            StageInfo.new_instance(),
            self.plan.first_layer,
            self.plan.end_layer,
            self._pool.blocks,
            self._pool.block_size,
        )
        if on_gpu and settings.execution != "eager":
            self.capture(CudaRecorder(self.device))

    def _make_pool(
        self,
        settings: Settings,
        checkpoint: Checkpoint,
        plans: tuple[StagePlan, ...],
        pipelines: Sequence[tuple[str, ...]],
    ) -> KVPool:
        shape = kv_shape(checkpoint.config.text_config, checkpoint.dtype)
        tokens = settings.kv_pool_tokens or CPU_POOL_TOKENS
        blocks = -(-tokens // settings.block_size)
        if self.device != "cpu" and not settings.kv_pool_tokens:
            memory = torch.cuda.get_device_properties(self.device).total_memory * settings.kv_memory_fraction
            layers = layers_on(self.device, settings, plans, pipelines)
            blocks = blocks_for_memory(memory, layers, settings.block_size, shape)
        if blocks < 1:
            raise SettingsError("setting 'kv_memory_fraction' leaves no memory for a single KV block")
        layers = self.plan.end_layer - self.plan.first_layer
        return KVPool(self.plan.first_layer, layers, blocks, settings.block_size, shape, self.device)

    @torch.inference_mode()
    def capture(self, recorder: Recorder) -> None:
        """Capture the graphs of this stage's steps. Raises SettingsError when that fails and no fallback is allowed."""
        start_graphs(self._settings, self._layers, self.runner, recorder)
        self.runs_paged = True
        torch.cuda.empty_cache()
        execution = "graph" if self.runner.captured else "eager"
        self.info = replace(self.info, execution=execution, compiled=self.runner.is_compiled)

    @torch.inference_mode()
    def run(self, tensors: Tensors, outputs: Collection[str]) -> dict[str, torch.Tensor]:
        """One packed call. Returns the wanted outputs, as tensors that no later call changes."""
        if self.info.answers(outputs):
            return {STAGE_INFO.name: self.info.to_tensor()}
        call = parse_call(tensors, self.interface, self.contract, self.plan, self._pool.blocks, self._pool.block_size)
        self._check(call)
        if call.burst.is_linked:
            return self._run_linked(call, outputs)
        # Copies: what the server sends must not alias what the caller or a later call may rewrite.
        return {name: tensor.clone() for name, tensor in self._run_one(call, outputs).items()}

    def _run_linked(self, call: LanguageCall, outputs: Collection[str]) -> dict[str, torch.Tensor]:
        links = self._door.join(call.burst.ticket, len(call.tensors["sample_rows"]) if self.plan.is_last else call.rows)
        return run_burst(call, self.plan, self.device, links, self._entering, lambda one: self._run_one(one, outputs))

    def _entering(self, call: LanguageCall) -> torch.Tensor:
        """Where the rows of a linked call's next step go."""
        if self._continues(call):
            return self.runner.entering(call.rows)
        if self.plan.is_first:
            return torch.empty(call.rows, dtype=torch.int64)
        none = call.tensors["hidden_states"]
        return torch.empty(call.rows, none.shape[1], dtype=none.dtype, device=self.device)

    def _continues(self, call: LanguageCall) -> bool:
        """Whether this step is the last one's replay once more."""
        return call.continues and self.runner.can_continue and not call.eager

    def _run_one(self, call: LanguageCall, outputs: Collection[str]) -> dict[str, torch.Tensor]:
        if self._continues(call):
            results, features = self.runner.continue_decode(_wanted(call, outputs)), {}
        else:
            features = {name: self._moved(tensor) for name, tensor in call.features.items()}
            rows = self._image_rows(call)
            results = self._run_layers(self._enter(call, features, rows), call, features, rows, outputs)
        if self.plan.is_last:
            return self._sample(results, call, outputs)
        forwarded = [name for name in map(deepstack_name, self.plan.forwarded) if name in features]
        return {"hidden_states": results["hidden"], **{name: features[name] for name in forwarded}}

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """On this stage's device, without waiting for it: with another process on a GPU each wait may last until that
        one's time slice is over. Pageable memory, as all of a call's host tensors are, is read before this returns.
        """
        return tensor.to(self.device, non_blocking=True)

    def _enter(self, call: LanguageCall, features: dict[str, torch.Tensor], rows: ImageRows | None) -> torch.Tensor:
        """The rows that layer `first_layer` takes, [rows, width], or the token ids [rows] that they are to be."""
        if not self.plan.is_first:
            return self._moved(call.tensors["hidden_states"])
        ids = call.tensors["input_ids"]
        if rows is None:
            return ids
        return self._family.replace_image_rows(
            self._embed(self._moved(ids)), rows[0], features.get("image_embeds"), rows[1]
        )

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        """-1 stands for logits that were not finite: a burst goes on with any token, and that request fails."""
        return self._family.embed(self._model, ids.clamp_min(0))

    def _run_layers(
        self,
        entering: torch.Tensor,
        call: LanguageCall,
        features: dict[str, torch.Tensor],
        rows: ImageRows | None,
        outputs: Collection[str],
    ) -> dict[str, torch.Tensor]:
        """Rows or token ids through the layers; for a decode step of the last stage on a GPU, what the head made."""
        injected = self._step_features(features, rows)
        has_layers = self.plan.first_layer < self.plan.end_layer
        if call.block_tables is not None and self.runs_paged and has_layers and len(entering):
            step = step_rows(call, call.block_tables, self._pool.block_size)
            return self.runner.run(entering, step, injected, _wanted(call, outputs), eager=call.eager)
        hidden = self._embed(self._moved(entering)) if entering.ndim == 1 else entering
        if len(hidden) == 0 or not has_layers:
            return {"hidden": hidden.clone()}
        packed = packed_step(call, self._pool, self.device)
        inject = None if injected is None else injected.add
        positions = self._moved(call.tensors["position_ids"])
        return {"hidden": self._layers.run(hidden, positions, lambda _: packed, inject)}

    def _step_features(self, features: dict[str, torch.Tensor], rows: ImageRows | None) -> StepFeatures | None:
        if rows is None or not self.plan.injected:
            return None
        own = {layer: features[deepstack_name(layer)] for layer in self.plan.injected}
        return StepFeatures(own, *rows)

    def _image_rows(self, call: LanguageCall) -> ImageRows | None:
        if not call.has_images:
            return None
        return self._moved(call.tensors["image_rows"]), self._moved(call.tensors["feature_rows"])

    def _finish(self, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
        """What the head makes of rows [rows, width] that end prompts."""
        return self.runner.finish(hidden) if self.runs_paged else {"logits": self._family.logits(self._model, hidden)}

    def _head(self, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
        """Greedy choice and logits of every row."""
        logits = self._family.logits(self._model, hidden)
        choice = choose(logits, None)
        return {"next_ids": choice.ids, "logprobs": choice.logprobs, "logits": logits}

    def _sample(
        self, results: dict[str, torch.Tensor], call: LanguageCall, outputs: Collection[str]
    ) -> dict[str, torch.Tensor]:
        rows, computed_prompts = call.tensors["sample_rows"], "hidden" in results
        if computed_prompts:
            results = self._finish(_take(results["hidden"], rows))
        else:
            results = {name: _take(tensor, rows) for name, tensor in results.items()}
        asks_top = _asks_top(outputs)
        sampling = {spec.name: self._moved(call.tensors[spec.name]) for spec in SAMPLING if spec.name in call.tensors}
        forced = call.tensors.get("forced_ids")
        if "next_ids" in results and forced is None and not sampling and not asks_top:
            return {name: results[name] for name in ("next_ids", "logprobs")}
        logits = results["logits"]
        choice = choose_by_parts(
            logits,
            SamplingTensors(**sampling) if sampling else None,
            None if forced is None else self._moved(forced),
            PROMPT_ROWS_AT_ONCE if computed_prompts else len(logits),
        )
        chosen = {"next_ids": choice.ids, "logprobs": choice.logprobs}
        if asks_top:
            chosen[TOP_LOGPROBS.name], chosen[TOP_IDS.name] = top_logprobs(logits, self._top_count(call))
        return chosen

    def _check(self, call: LanguageCall) -> None:
        """Before a layer writes anything."""
        if self.plan.is_first:
            check_token_ids(call, "input_ids", self._vocabulary)
            check_placeholders(call, self._placeholder_ids)
        if self.plan.is_last:
            self._top_count(call)
            check_token_ids(call, "forced_ids", self._vocabulary)

    def _top_count(self, call: LanguageCall) -> int:
        count = int(call.tensors["top_count"][0]) if "top_count" in call.tensors else 1
        if not 1 <= count <= MAX_TOP_COUNT:
            raise WireError(f"tensor 'top_count' is {count}; allowed: 1 to {MAX_TOP_COUNT}")
        return count


def _asks_top(outputs: Collection[str]) -> bool:
    return TOP_IDS.name in outputs or TOP_LOGPROBS.name in outputs


def _wanted(call: LanguageCall, outputs: Collection[str]) -> frozenset[str]:
    """What a replay must hand out: the greedy choice, or the logits where the call asks for more."""
    more = call.tensors.keys() & {"forced_ids", "temperature"} or _asks_top(outputs)
    return frozenset({"hidden", "logits"} if more else {"hidden", "next_ids", "logprobs"})


def _take(tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """tensor[rows]; the tensor itself where that is all of it, as in a decode step."""
    if len(rows) == len(tensor) and torch.equal(rows, torch.arange(len(rows))):
        return tensor
    return tensor.index_select(0, rows.to(tensor.device, non_blocking=True))
