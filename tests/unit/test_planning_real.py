"""Plans of real checkpoints' shapes: layers, tensors between stages, bytes. No weights: see tests/data/configs."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from deepstack_serving.checkpoint import open_config
from deepstack_serving.injection import plan_stages
from deepstack_serving.planning.deployment import Crossing, DeploymentPlan, GpuMemory, crossings, plan_deployment

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
LAYERS = {
    "qwen3_vl_2b": 28,
    "qwen3_vl_4b": 36,
    "qwen3_vl_8b": 36,
    "qwen3_vl_32b": 64,
    "qwen3_vl_30b_a3b": 48,
    "qwen3_vl_235b_a22b": 94,
    "granite_vision_4_1_4b": 40,
}
# Keys and values of one token in bfloat16: 2 x heads x head_dim x 2 bytes x layers.
KV_BYTES_PER_TOKEN = {
    "qwen3_vl_2b": 2 * 8 * 128 * 2 * 28,
    "qwen3_vl_4b": 2 * 8 * 128 * 2 * 36,
    "qwen3_vl_8b": 147_456,
    "qwen3_vl_32b": 262_144,
    "qwen3_vl_30b_a3b": 2 * 4 * 128 * 2 * 48,
    "qwen3_vl_235b_a22b": 192_512,
    "granite_vision_4_1_4b": 2 * 8 * 64 * 2 * 40,
}
# Published numbers; tests/data/configs/README.md says by whom.
PARAMETERS = {
    "qwen3_vl_2b": 2_127_532_032,
    "qwen3_vl_4b": 4_437_815_808,
    "qwen3_vl_8b": 8_767_123_696,
    "qwen3_vl_32b": 33_357_390_064,
    "qwen3_vl_30b_a3b": 31_070_754_032,
    "qwen3_vl_235b_a22b": 235_670_022_896,
}
TIED = {"qwen3_vl_2b": 151_936 * 2048, "qwen3_vl_4b": 151_936 * 2560}  # parameters of the matrix that two stages hold
GRANITE_LAYERS = (0, 3, 6, 9, 12, 15, 18, 21)


@cache
def plan_of(name: str, stages: int) -> DeploymentPlan:
    """With the suggested split."""
    return plan_deployment(open_config(CONFIGS / name), stages, None, GpuMemory())


def crossing(name: str, points: tuple[int, ...]) -> list[tuple[str, ...]]:
    """The tensors from each model to the next."""
    found = crossings_of(name, points)
    pairs = dict.fromkeys((item.sender, item.receiver) for item in found)
    return [tuple(item.tensor for item in found if (item.sender, item.receiver) == pair) for pair in pairs]


def crossings_of(name: str, points: tuple[int, ...]) -> tuple[Crossing, ...]:
    checkpoint = open_config(CONFIGS / name)
    return crossings(
        checkpoint, plan_stages(checkpoint.layer_count, len(points) + 1, points, checkpoint.deepstack_layers)
    )


def ds(*layers: int) -> tuple[str, ...]:
    return tuple(f"ds_{layer}" for layer in layers)


def test_every_folder_is_planned_here() -> None:
    assert {path.name for path in CONFIGS.iterdir() if path.is_dir()} == LAYERS.keys()


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", LAYERS)
def test_stages_divide_the_layers(name: str, stages: int) -> None:
    language = plan_of(name, stages).models[1:]
    assert [layer for model in language for layer in range(model.first_layer, model.end_layer)] == list(
        range(LAYERS[name])
    )
    assert all(model.end_layer > model.first_layer for model in language)


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", LAYERS)
def test_kv_bytes_of_a_token_are_the_calculated_ones(name: str, stages: int) -> None:
    plan = plan_of(name, stages)
    assert plan.dtype == "bfloat16"
    assert plan.kv_bytes_per_token == KV_BYTES_PER_TOKEN[name]
    assert sum(model.kv_bytes_per_token for model in plan.models) == KV_BYTES_PER_TOKEN[name]


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", PARAMETERS)
def test_all_stages_together_hold_the_published_parameters(name: str, stages: int) -> None:
    assert plan_of(name, stages).parameter_bytes == 2 * (PARAMETERS[name] + TIED.get(name, 0))


EARLY = ("image_embeds", "ds_0", "ds_1", "ds_2")
HIDDEN = ("hidden_states",)


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ((18,), [EARLY, HIDDEN]),
        ((1,), [EARLY, ("hidden_states", "ds_1", "ds_2")]),
        ((9, 18, 27), [EARLY, HIDDEN, HIDDEN, HIDDEN]),
        ((1, 2, 3), [EARLY, ("hidden_states", "ds_1", "ds_2"), ("hidden_states", "ds_2"), HIDDEN]),
    ],
)
def test_features_of_the_first_layers_cross_until_their_layer(
    points: tuple[int, ...], expected: list[tuple[str, ...]]
) -> None:
    assert crossing("qwen3_vl_8b", points) == expected


@pytest.mark.parametrize(
    ("points", "forwarded"),
    [
        ((20,), [(21,)]),
        ((9,), [(9, 12, 15, 18, 21)]),
        ((10, 20, 30), [(12, 15, 18, 21), (21,), ()]),
        ((1, 4, 22), [(3, 6, 9, 12, 15, 18, 21), (6, 9, 12, 15, 18, 21), ()]),
    ],
)
def test_features_of_many_layers_cross_until_their_layer(
    points: tuple[int, ...], forwarded: list[tuple[int, ...]]
) -> None:
    expected = [ds(*GRANITE_LAYERS), *((*HIDDEN, *ds(*layers)) for layers in forwarded)]
    assert crossing("granite_vision_4_1_4b", points) == expected


@pytest.mark.parametrize(("name", "width"), [("qwen3_vl_8b", 4096), ("granite_vision_4_1_4b", 2560)])
def test_crossing_tensors_have_the_models_width(name: str, width: int) -> None:
    found = crossings_of(name, (10,))
    assert {(item.width, item.dtype, item.bytes_per_row) for item in found} == {(width, "BF16", 2 * width)}
    assert {item.rows for item in found if item.tensor == "hidden_states"} == {"tokens"}
    assert {item.rows for item in found if item.tensor == "ds_0"} == {"image tokens"}


def test_dtype_that_is_asked_for_doubles_the_bytes() -> None:
    plan = plan_deployment(open_config(CONFIGS / "qwen3_vl_2b", "float32"), 1, None, GpuMemory())
    assert (plan.dtype, plan.parameter_bytes) == ("float32", 4 * PARAMETERS["qwen3_vl_2b"])
