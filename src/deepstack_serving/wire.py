"""Every tensor that crosses a process border, defined once: name, type, shape, sender and receiver.

The stages declare these to Triton (auto_complete_config) and check calls against them; the orchestrator builds its
calls from the same names. `-1` in a shape is a free dimension. The orchestrator's own interface is what clients see.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from deepstack_serving.errors import WireError
from deepstack_serving.injection import StagePlan

_ITEM_BYTES = {"FP32": 4, "BF16": 2, "FP16": 2}
VISION_ENCODER = "vision_encoder"
ORCHESTRATOR = "orchestrator"


@dataclass(frozen=True)
class TensorSpec:
    """One tensor: `dtype` is Triton's name without TYPE_ (STRING in configurations is BYTES here)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    optional: bool = False

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)}{' optional' if self.optional else ''}"


@dataclass(frozen=True)
class ModelInterface:
    """What one Triton model receives and sends."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True)
class FeatureContract:
    """What the checkpoint fixes about the tensors between the stages."""

    dtype: str
    hidden_size: int
    position_axes: int
    deepstack_layers: tuple[int, ...]
    has_image_embeds: bool
    has_video: bool = False


class _TensorLike(Protocol):
    @property
    def shape(self) -> Sequence[int]: ...


def deepstack_name(layer: int) -> str:
    """The name of the features that belong to one decoder layer, the same in every process."""
    return f"ds_{layer}"


def is_forwarded(name: str) -> bool:
    """Whether the orchestrator only passes the tensor on, so that it may stay on a GPU; all others it reads."""
    return name in ("image_embeds", "hidden_states") or name.startswith("ds_")


STAGE_INFO = TensorSpec("stage_info", "UINT8", (-1,))  # JSON of stages.info.StageInfo; a call for it alone runs nothing

# vision_encoder. From the orchestrator, or a client that uses the encoder alone.
IMAGE = TensorSpec("image", "BYTES", (-1,), optional=True)  # encoded image files, one per image
COMING_IMAGES = TensorSpec("coming_images", "BYTES", (-1,), optional=True)  # of a later call: to be decoded meanwhile
VIDEO = TensorSpec("video", "BYTES", (-1,), optional=True)  # video files, animations or JSON lists of frames
FILE_NAMES = frozenset(spec.name for spec in (IMAGE, COMING_IMAGES, VIDEO))
VIDEO_SAMPLING = TensorSpec("video_sampling", "FP32", (2,), optional=True)  # frames a second, or in all; 0: not given
IMAGE_GRID = TensorSpec("image_grid_thw", "INT64", (-1, 3))  # patches of each image: time, height, width
IMAGE_TOKENS = TensorSpec("image_tokens", "INT64", (-1,))  # language tokens of each image
VIDEO_GRID = TensorSpec("video_grid_thw", "INT64", (-1, 3))  # patches of each video: pairs of frames, height, width
VIDEO_TOKENS = TensorSpec("video_tokens", "INT64", (-1,))  # language tokens of each video

# Language stages. Rows of all sequences are packed; sequence s owns query_lengths[s] rows, in order.
INPUT_IDS = TensorSpec("input_ids", "INT64", (-1,))
QUERY_LENGTHS = TensorSpec("query_lengths", "INT32", (-1,))
CONTEXT_LENGTHS = TensorSpec("context_lengths", "INT32", (-1,))  # tokens attended to, this call's included
BLOCK_TABLES = TensorSpec("block_tables", "INT32", (-1, -1), optional=True)  # absent or no columns: stateless call
EAGER = TensorSpec("eager", "BOOL", (1,), optional=True)  # true: compute this call without replaying a graph
# A linked call: all stages are called at once. `exchange` names the shared memory over which they hand each other
# hidden states and tokens meanwhile, and the burst in it. Stages behind the first are sent no rows, and none but the
# last answers any. It is one step of any kind, but for features that stages would have to forward, or a burst: up to
# `decode_steps` decode steps. The orchestrator takes a burst's tokens from the memory as they come, and may end it
# early; the last stage then answers all steps that were run, one after the other.
DECODE_STEPS = TensorSpec("decode_steps", "INT32", (1,), optional=True)  # absent: 1
EXCHANGE = TensorSpec("exchange", "UINT8", (-1,), optional=True)  # text: exchange.Exchange.begin
IMAGE_ROWS = TensorSpec("image_rows", "INT64", (-1,), optional=True)  # packed rows that are image or video tokens
FEATURE_ROWS = TensorSpec("feature_rows", "INT64", (-1,), optional=True)  # the feature row of each of image_rows

# The last language stage. One draw per row named in sample_rows; the five sampling tensors come all or none.
SAMPLE_ROWS = TensorSpec("sample_rows", "INT64", (-1,))
FORCED_IDS = TensorSpec("forced_ids", "INT64", (-1,), optional=True)  # score these instead of sampling
TOP_COUNT = TensorSpec("top_count", "INT32", (1,), optional=True)  # how many alternatives top_ids holds
SAMPLING = (
    TensorSpec("temperature", "FP32", (-1,), optional=True),  # 0 is greedy
    TensorSpec("top_k", "INT32", (-1,), optional=True),  # 0 is off
    TensorSpec("top_p", "FP32", (-1,), optional=True),
    TensorSpec("min_p", "FP32", (-1,), optional=True),
    TensorSpec("seed", "INT64", (-1, 2), optional=True),  # the request's seed, and the number of this draw in it
)
NEXT_IDS = TensorSpec("next_ids", "INT64", (-1,))  # -1: the row's logits were not finite
LOGPROBS = TensorSpec("logprobs", "FP32", (-1,))  # of next_ids, before temperature and filters
TOP_IDS = TensorSpec("top_ids", "INT64", (-1, -1))
TOP_LOGPROBS = TensorSpec("top_logprobs", "FP32", (-1, -1))

ORCHESTRATOR_INTERFACE = ModelInterface(
    inputs=tuple(
        TensorSpec(name, dtype, (size,), optional=True)
        for name, dtype, size in (
            ("text_input", "BYTES", 1),
            ("messages", "BYTES", 1),
            ("image", "BYTES", -1),
            ("video", "BYTES", -1),
            ("video_fps", "FP32", 1),
            ("video_num_frames", "INT32", 1),
            ("stream", "BOOL", 1),
            ("sampling_parameters", "BYTES", 1),
            ("exclude_input_in_output", "BOOL", 1),
            ("raw_prompt", "BOOL", 1),
            ("return_finish_reason", "BOOL", 1),
            ("return_cumulative_logprob", "BOOL", 1),
            ("return_logprobs", "BOOL", 1),
            ("return_num_input_tokens", "BOOL", 1),
            ("return_num_output_tokens", "BOOL", 1),
        )
    ),
    outputs=tuple(
        TensorSpec(name, dtype, (1,))
        for name, dtype in (
            ("text_output", "BYTES"),
            ("finish_reason", "BYTES"),
            ("cumulative_logprob", "FP32"),
            ("logprobs", "BYTES"),
            ("num_input_tokens", "UINT32"),
            ("num_output_tokens", "UINT32"),
        )
    ),
)


def image_embeds(contract: FeatureContract) -> TensorSpec:
    """The features that replace the placeholder embeddings, sent by the encoder to the first language stage."""
    return TensorSpec("image_embeds", contract.dtype, (-1, contract.hidden_size), optional=True)


def hidden_states(contract: FeatureContract) -> TensorSpec:
    """The packed rows between two language stages."""
    return TensorSpec("hidden_states", contract.dtype, (-1, contract.hidden_size))


def row_bytes(contract: FeatureContract) -> int:
    """Bytes of a row of hidden states."""
    return contract.hidden_size * _ITEM_BYTES[contract.dtype]


def deepstack(contract: FeatureContract, layers: Iterable[int]) -> tuple[TensorSpec, ...]:
    """The features of these decoder layers, sent by the encoder and forwarded from stage to stage."""
    width = contract.hidden_size
    return tuple(TensorSpec(deepstack_name(layer), contract.dtype, (-1, width), optional=True) for layer in layers)


def feature_inputs(contract: FeatureContract, plan: StagePlan) -> tuple[TensorSpec, ...]:
    """The features that a language stage receives; in one call all of them are there, or none."""
    embeds = (image_embeds(contract),) if plan.is_first and contract.has_image_embeds else ()
    return embeds + deepstack(contract, plan.received)


def vision_interface(contract: FeatureContract) -> ModelInterface:
    """vision_encoder. The rows of its features are those of the images, in order, then those of the videos."""
    embeds = (image_embeds(contract),) if contract.has_image_embeds else ()
    features = deepstack(contract, contract.deepstack_layers)
    inputs = (IMAGE, COMING_IMAGES, *((VIDEO, VIDEO_SAMPLING) if contract.has_video else ()))
    sizes = (IMAGE_GRID, IMAGE_TOKENS, *((VIDEO_GRID, VIDEO_TOKENS) if contract.has_video else ()))
    return ModelInterface(inputs, (*embeds, *features, *sizes, STAGE_INFO))


def language_interface(contract: FeatureContract, plan: StagePlan) -> ModelInterface:
    """One language stage: it declares exactly the features that it receives and forwards."""
    rows = INPUT_IDS if plan.is_first else hidden_states(contract)
    positions = TensorSpec("position_ids", "INT64", (contract.position_axes, -1))
    features = feature_inputs(contract, plan)
    inputs: tuple[TensorSpec, ...] = (rows, positions, QUERY_LENGTHS, CONTEXT_LENGTHS, BLOCK_TABLES, EAGER)
    inputs += (DECODE_STEPS, EXCHANGE)
    inputs += (IMAGE_ROWS, FEATURE_ROWS, *features) if features else ()
    if not plan.is_last:
        return ModelInterface(inputs, (hidden_states(contract), *deepstack(contract, plan.forwarded), STAGE_INFO))
    outputs = (NEXT_IDS, LOGPROBS, TOP_IDS, TOP_LOGPROBS, STAGE_INFO)
    return ModelInterface((*inputs, SAMPLE_ROWS, FORCED_IDS, TOP_COUNT, *SAMPLING), outputs)


def check_declared(model: str, declared: ModelInterface, interface: ModelInterface) -> None:
    """Raises WireError when a model's configuration declares a tensor that it does not have, or lacks one that it has.

    Triton only ever adds to what a config.pbtxt declares, so a tensor too many there stays.
    """
    outputs = tuple(replace(spec, optional=False) for spec in interface.outputs)  # Triton has no optional outputs
    for kind, found, wanted in (("input", declared.inputs, interface.inputs), ("output", declared.outputs, outputs)):
        wrong = [spec for spec in found if spec not in wanted] or [spec for spec in wanted if spec not in found]
        if wrong:
            raise WireError(
                f"{model} declares {'no' if wrong[0] in wanted else 'the'} {kind} {wrong[0]}, but with this checkpoint "
                f"and split its {kind}s are {', '.join(map(str, wanted))}: mend its config.pbtxt"
            )


def check_tensors(specs: Sequence[TensorSpec], tensors: Mapping[str, _TensorLike], dtypes: Mapping[str, str]) -> None:
    """Raises WireError, naming the tensor, when one is missing, unexpected, or of another type or shape."""
    known = {spec.name: spec for spec in specs}
    for name in tensors:
        if name not in known:
            raise WireError(f"unexpected tensor {name!r}; this model takes {', '.join(known)}")
    for spec in specs:
        if spec.name not in tensors:
            if spec.optional:
                continue
            raise WireError(f"tensor {spec.name!r} is missing")
        if dtypes[spec.name] != spec.dtype:
            raise WireError(f"tensor {spec.name!r} has type {dtypes[spec.name]}; expected {spec.dtype}")
        _check_shape(spec, tuple(tensors[spec.name].shape))


def _check_shape(spec: TensorSpec, shape: tuple[int, ...]) -> None:
    fits = len(shape) == len(spec.shape) and all(
        want in (-1, have) for want, have in zip(spec.shape, shape, strict=True)
    )
    if not fits:
        raise WireError(f"tensor {spec.name!r} has shape {list(shape)}; expected {list(spec.shape)}")
