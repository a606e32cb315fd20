"""The plan of a deployment: what each model loads, what crosses between them, and whether it fits the GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from deepstack_serving.checkpoint import Checkpoint
from deepstack_serving.injection import StagePlan, plan_stages
from deepstack_serving.kv_pool import KVShape, blocks_for_memory, kv_shape
from deepstack_serving.planning.placing import Placement, place, suggest_split
from deepstack_serving.planning.sizes import measure, stage_bytes
from deepstack_serving.repository import stage_names
from deepstack_serving.settings import Settings
from deepstack_serving.wire import VISION_ENCODER, ModelInterface, language_interface, vision_interface


@dataclass(frozen=True)
class GpuMemory:
    """Memory of the GPUs in bytes, in order; empty where it is not known. The KV pools' share is of all of it."""

    sizes: tuple[int, ...] = ()
    kv_fraction: float = Settings.kv_memory_fraction
    block_size: int = Settings.block_size


@dataclass(frozen=True)
class ModelPlan:
    """One stage. Layers [first_layer, end_layer); `receives` and `forwards` are the layers of its `ds_<layer>`."""

    name: str
    gpu: int
    first_layer: int
    end_layer: int
    parameter_bytes: int
    kv_bytes_per_token: int
    receives: tuple[int, ...]
    forwards: tuple[int, ...]


@dataclass(frozen=True)
class Crossing:
    """A tensor from one model to the next, [rows, width]; rows are tokens, or image tokens only."""

    tensor: str
    sender: str
    receiver: str
    rows: str
    width: int
    dtype: str
    bytes_per_row: int


@dataclass(frozen=True)
class GpuPlan:
    """What one GPU holds. Where its memory is known: its KV pools, the tokens that they take, and whether all fits."""

    gpu: int
    models: tuple[str, ...]
    parameter_bytes: int
    kv_bytes_per_token: int
    memory_bytes: int | None = None
    kv_pool_bytes: int | None = None
    kv_tokens: int | None = None
    fits: bool | None = None


@dataclass(frozen=True)
class DeploymentPlan:
    """Everything that `deepstack plan` says."""

    model_type: str
    dtype: str
    layers: int
    deepstack_layers: tuple[int, ...]
    split_points: tuple[int, ...]
    suggested_split_points: tuple[int, ...]
    models: tuple[ModelPlan, ...]
    crossings: tuple[Crossing, ...]
    gpus: tuple[GpuPlan, ...]
    parameter_bytes: int
    kv_bytes_per_token: int

    @property
    def fits(self) -> bool:
        """False when a GPU of known size is too small."""
        return all(gpu.fits is not False for gpu in self.gpus)


def plan_deployment(
    checkpoint: Checkpoint, stage_count: int, points: Sequence[int] | None, memory: GpuMemory
) -> DeploymentPlan:
    """`points` None takes the suggested split. Without known memory each language stage has a GPU of one size.

    Raises SettingsError when the split or the number of GPUs does not fit, CheckpointError for the checkpoint.
    """
    placement = place(stage_count, len(memory.sizes) or stage_count)
    parts = measure(checkpoint)
    suggested = suggest_split(parts, placement, memory.sizes or [1.0] * stage_count)
    plans = plan_stages(
        checkpoint.layer_count, stage_count, suggested if points is None else points, checkpoint.deepstack_layers
    )
    shape = kv_shape(checkpoint.config.text_config, checkpoint.dtype)
    vision = ModelPlan(
        VISION_ENCODER, placement.vision, 0, 0, parts.vision, 0, (), checkpoint.contract.deepstack_layers
    )
    models = (vision, *_language_models(checkpoint, plans, placement, shape))
    return DeploymentPlan(
        model_type=checkpoint.family.model_type,
        dtype=str(checkpoint.dtype).removeprefix("torch."),
        layers=checkpoint.layer_count,
        deepstack_layers=checkpoint.contract.deepstack_layers,
        split_points=tuple(plan.first_layer for plan in plans[1:]),
        suggested_split_points=suggested,
        models=models,
        crossings=crossings(checkpoint, plans),
        gpus=_gpus(models, memory, shape),
        parameter_bytes=sum(model.parameter_bytes for model in models),
        kv_bytes_per_token=sum(model.kv_bytes_per_token for model in models),
    )


def _language_models(
    checkpoint: Checkpoint, plans: Sequence[StagePlan], placement: Placement, shape: KVShape
) -> tuple[ModelPlan, ...]:
    return tuple(
        ModelPlan(
            name,
            gpu,
            plan.first_layer,
            plan.end_layer,
            stage_bytes(checkpoint, plan),
            (plan.end_layer - plan.first_layer) * shape.bytes_per_token_and_layer,
            plan.received,
            plan.forwarded,
        )
        for name, gpu, plan in zip(stage_names(len(plans)), placement.stages, plans, strict=True)
    )


def crossings(checkpoint: Checkpoint, plans: Sequence[StagePlan]) -> tuple[Crossing, ...]:
    """What each model declares to send and the next to receive: the orchestrator passes it on."""
    contract = checkpoint.contract
    chain: list[tuple[str, ModelInterface]] = [(VISION_ENCODER, vision_interface(contract))]
    names = stage_names(len(plans))
    chain += [(name, language_interface(contract, plan)) for name, plan in zip(names, plans, strict=True)]
    return tuple(
        Crossing(
            spec.name,
            sender,
            receiver,
            "image tokens" if spec.optional else "tokens",  # features are there with images only
            spec.shape[-1],
            spec.dtype,
            spec.shape[-1] * checkpoint.dtype.itemsize,
        )
        for (sender, sent), (receiver, taken) in pairwise(chain)
        for spec in sent.outputs
        if spec.name in {wanted.name for wanted in taken.inputs}
    )


def _gpus(models: Sequence[ModelPlan], memory: GpuMemory, shape: KVShape) -> tuple[GpuPlan, ...]:
    found = []
    for gpu in sorted({model.gpu for model in models}):
        here = [model for model in models if model.gpu == gpu]
        weights, kv = sum(model.parameter_bytes for model in here), sum(model.kv_bytes_per_token for model in here)
        names = tuple(model.name for model in here)
        if not memory.sizes:
            found.append(GpuPlan(gpu, names, weights, kv))
            continue
        size = memory.sizes[gpu]
        pool = int(size * memory.kv_fraction) if kv else 0
        layers = kv // shape.bytes_per_token_and_layer
        tokens = blocks_for_memory(pool, layers, memory.block_size, shape) * memory.block_size if kv else None
        found.append(GpuPlan(gpu, names, weights, kv, size, pool, tokens, weights + pool <= size))
    return tuple(found)
