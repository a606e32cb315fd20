"""A stage declares exactly the tensors it receives and forwards, whatever the split."""

from __future__ import annotations

import pytest

from deepstack_serving.injection import plan_stages
from deepstack_serving.wire import FeatureContract, ModelInterface, language_interface, vision_interface

CONTRACT = FeatureContract("BF16", 8, 3, (0, 1, 2), True)


def features_in(interface: ModelInterface) -> list[str]:
    return [spec.name for spec in interface.inputs if spec.name.startswith(("ds_", "image_embeds"))]


def features_out(interface: ModelInterface) -> list[str]:
    return [spec.name for spec in interface.outputs if spec.name.startswith(("ds_", "image_embeds"))]


@pytest.mark.parametrize(("point", "late"), [(0, [0, 1, 2]), (1, [1, 2]), (2, [2]), (3, []), (6, [])], ids=str)
def test_late_stage_takes_the_tensors_of_its_layers(point: int, late: list[int]) -> None:
    plans = plan_stages(6, 2, [point], (0, 1, 2))
    first, last = (language_interface(CONTRACT, plan) for plan in plans)
    assert features_in(first) == ["image_embeds", "ds_0", "ds_1", "ds_2"]
    assert features_out(first) == features_in(last) == [f"ds_{layer}" for layer in late]
    assert features_out(last) == []


def test_stage_without_features_takes_no_rows_that_map_them() -> None:
    interface = language_interface(CONTRACT, plan_stages(6, 2, [3], (0, 1, 2))[1])
    assert not {"image_rows", "feature_rows"} & {spec.name for spec in interface.inputs}


def test_only_the_last_stage_samples() -> None:
    first, last = (language_interface(CONTRACT, plan) for plan in plan_stages(6, 2, [3], (0, 1, 2)))
    assert "sample_rows" not in {spec.name for spec in first.inputs}
    assert {"next_ids", "logprobs", "top_ids", "top_logprobs"} <= {spec.name for spec in last.outputs}


def test_family_without_image_embeds_declares_none() -> None:
    contract = FeatureContract("BF16", 8, 1, (0, 3), False)
    assert features_out(vision_interface(contract)) == ["ds_0", "ds_3"]
    assert features_in(language_interface(contract, plan_stages(6, 1, [], (0, 3))[0])) == ["ds_0", "ds_3"]


def test_features_and_hidden_states_have_the_checkpoints_type() -> None:
    interface = language_interface(CONTRACT, plan_stages(6, 2, [1], (0, 1, 2))[0])
    typed = {spec.name: spec.dtype for spec in (*interface.inputs, *interface.outputs)}
    assert {typed[name] for name in ("image_embeds", "ds_0", "ds_2", "hidden_states")} == {"BF16"}


def test_model_without_deepstack_declares_no_features() -> None:
    contract = FeatureContract("FP32", 8, 1, (), False)
    assert features_in(language_interface(contract, plan_stages(6, 1, [], ())[0])) == []
