"""One language stage: a range of decoder layers, with the embedding in front or the head behind where it owns them.

A call's way: check (call.py), lay out (layout.py), embed or take over hidden states, layers with their deepstack
features, then hidden states and later layers' features out, or logits and the next tokens.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from deepstack_serving.attention import ATTENTION, PackedStep
from deepstack_serving.checkpoint import Checkpoint
from deepstack_serving.errors import SettingsError, WireError
from deepstack_serving.injection import InjectionPoint, StagePlan, add_features
from deepstack_serving.kv_pool import KVPool, blocks_for_memory, kv_shape
from deepstack_serving.sampling import SamplingTensors, choose, top_logprobs
from deepstack_serving.settings import Settings
from deepstack_serving.stages.call import LanguageCall, Tensors, check_placeholders, check_token_ids, parse_call
from deepstack_serving.stages.device import limit_cpu_threads, stage_device
from deepstack_serving.stages.info import StageInfo
from deepstack_serving.stages.layout import packed_step
from deepstack_serving.stages.loading import load_language_stage
from deepstack_serving.wire import SAMPLING, STAGE_INFO, TOP_IDS, TOP_LOGPROBS, deepstack_name, language_interface

CPU_POOL_TOKENS = 32_768
MAX_TOP_COUNT = 64


class LanguageStage:
    """Loads its own weights and owns the KV pool of its layers."""

    def __init__(
        self,
        settings: Settings,
        checkpoint: Checkpoint,
        plans: tuple[StagePlan, ...],
        names: tuple[str, ...],
        index: int,
    ):
        self.plan = plans[index]
        self.contract = checkpoint.contract
        self.interface = language_interface(self.contract, self.plan)
        self.device = stage_device(settings, names[index])
        limit_cpu_threads(settings)
        self._family = checkpoint.family
        self._placeholder_ids = self._family.placeholder_ids(checkpoint.config)
        self._vocabulary = int(checkpoint.config.text_config.vocab_size)
        self._model = load_language_stage(checkpoint, self.plan, self.device, ATTENTION)
        self._layers = self._family.text_model(self._model).layers
        self._pool = self._make_pool(settings, checkpoint, plans, names)
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

    def _make_pool(
        self, settings: Settings, checkpoint: Checkpoint, plans: tuple[StagePlan, ...], names: tuple[str, ...]
    ) -> KVPool:
        shape = kv_shape(checkpoint.config.text_config, checkpoint.dtype)
        tokens = settings.kv_pool_tokens or CPU_POOL_TOKENS
        blocks = -(-tokens // settings.block_size)
        if self.device != "cpu" and not settings.kv_pool_tokens:
            memory = torch.cuda.get_device_properties(self.device).total_memory * settings.kv_memory_fraction
            sharing = [
                plan for plan, name in zip(plans, names, strict=True) if stage_device(settings, name) == self.device
            ]
            layers = sum(plan.end_layer - plan.first_layer for plan in sharing)
            blocks = blocks_for_memory(memory, layers, settings.block_size, shape)
        if blocks < 1:
            raise SettingsError("setting 'kv_memory_fraction' leaves no memory for a single KV block")
        layers = self.plan.end_layer - self.plan.first_layer
        return KVPool(self.plan.first_layer, layers, blocks, settings.block_size, shape, self.device)

    @torch.inference_mode()
    def run(self, tensors: Tensors, outputs: Collection[str]) -> dict[str, torch.Tensor]:
        """One packed call. Returns the wanted outputs, as tensors that no later call changes."""
        if self.info.answers(outputs):
            return {STAGE_INFO.name: self.info.to_tensor()}
        call = parse_call(tensors, self.interface, self.contract, self.plan, self._pool.blocks, self._pool.block_size)
        if self.plan.is_last:
            self._check_asked(call)
        features = {name: tensor.to(self.device) for name, tensor in call.features.items()}
        hidden = self._run_layers(self._enter(call, features), call, features)
        if self.plan.is_last:
            return self._sample(hidden, call, outputs)
        # Copies: what the server sends must not alias what the caller or a later call may rewrite.
        forwarded = {
            name: features[name].clone() for name in map(deepstack_name, self.plan.forwarded) if name in features
        }
        return {"hidden_states": hidden, **forwarded}

    def _enter(self, call: LanguageCall, features: dict[str, torch.Tensor]) -> torch.Tensor:
        """The rows that layer `first_layer` takes, [rows, width]."""
        if not self.plan.is_first:
            return call.tensors["hidden_states"].to(self.device)
        check_token_ids(call, "input_ids", self._vocabulary)
        check_placeholders(call, self._placeholder_ids)
        hidden = self._family.embed(self._model, call.tensors["input_ids"].to(self.device))
        if call.has_images:
            rows, sources = self._image_rows(call)
            hidden = self._family.replace_image_rows(hidden, rows, features.get("image_embeds"), sources)
        return hidden

    def _run_layers(self, hidden: torch.Tensor, call: LanguageCall, features: dict[str, torch.Tensor]) -> torch.Tensor:
        if len(hidden) == 0 or self.plan.first_layer == self.plan.end_layer:
            return hidden.clone()
        step = packed_step(call, self._pool, self.device)
        positions = call.tensors["position_ids"].to(self.device)[:, None]
        rotary = self._family.rotary(self._model, hidden[None], positions)
        before = self._family.injection is InjectionPoint.BEFORE_LAYER
        for layer in range(self.plan.first_layer, self.plan.end_layer):
            if before:
                hidden = self._inject(hidden, layer, call, features)
            hidden = self._layer(layer, hidden, rotary, step)
            if not before:
                hidden = self._inject(hidden, layer, call, features)
        return hidden

    def _layer(self, layer: int, hidden: torch.Tensor, rotary: object, step: PackedStep) -> torch.Tensor:
        output: torch.Tensor = self._layers[layer](
            hidden[None], position_embeddings=rotary, attention_mask=None, packed=step
        )
        return output[0]

    def _inject(
        self, hidden: torch.Tensor, layer: int, call: LanguageCall, features: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        if layer not in self.plan.injected or not call.has_images:
            return hidden
        rows, sources = self._image_rows(call)
        return add_features(hidden, rows, features[deepstack_name(layer)], sources)

    def _image_rows(self, call: LanguageCall) -> tuple[torch.Tensor, torch.Tensor]:
        return call.tensors["image_rows"].to(self.device), call.tensors["feature_rows"].to(self.device)

    def _sample(self, hidden: torch.Tensor, call: LanguageCall, outputs: Collection[str]) -> dict[str, torch.Tensor]:
        rows = call.tensors["sample_rows"].to(self.device)
        logits = self._family.logits(self._model, hidden.index_select(0, rows))
        sampling = {
            spec.name: call.tensors[spec.name].to(self.device) for spec in SAMPLING if spec.name in call.tensors
        }
        forced = call.tensors.get("forced_ids")
        choice = choose(
            logits,
            SamplingTensors(**sampling) if sampling else None,
            None if forced is None else forced.to(self.device),
        )
        results = {"next_ids": choice.ids, "logprobs": choice.logprobs}
        if TOP_IDS.name in outputs or TOP_LOGPROBS.name in outputs:
            results[TOP_LOGPROBS.name], results[TOP_IDS.name] = top_logprobs(logits, self._top_count(call))
        return results

    def _check_asked(self, call: LanguageCall) -> None:
        """Before a layer writes anything."""
        self._top_count(call)
        check_token_ids(call, "forced_ids", self._vocabulary)

    def _top_count(self, call: LanguageCall) -> int:
        count = int(call.tensors["top_count"][0]) if "top_count" in call.tensors else 1
        if not 1 <= count <= MAX_TOP_COUNT:
            raise WireError(f"tensor 'top_count' is {count}; allowed: 1 to {MAX_TOP_COUNT}")
        return count
