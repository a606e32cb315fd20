"""Check that the running stages belong together, before the first request and after every failure."""

from __future__ import annotations

from collections.abc import Sequence

from deepstack_serving.engine.ports import Handle, StagePort
from deepstack_serving.errors import StageError
from deepstack_serving.injection import StagePlan
from deepstack_serving.media import MediaFiles
from deepstack_serving.stages.info import StageInfo
from deepstack_serving.wire import STAGE_INFO, FeatureContract, ModelInterface, language_interface


def ask_stages(
    port: StagePort, contract: FeatureContract, names: Sequence[str], plans: Sequence[StagePlan]
) -> tuple[StageInfo, ...]:
    """What all stages say of themselves, the encoder first. Raises DeepstackError."""
    wanted = [STAGE_INFO.name]
    answers = [port.call_encoder(MediaFiles(), wanted)]
    answers += [
        port.call(name, _no_rows(port, language_interface(contract, plan)), wanted)
        for name, plan in zip(names, plans, strict=True)
    ]
    return tuple(StageInfo.from_bytes(port.array(answer[STAGE_INFO.name]).tobytes()) for answer in answers)


def check_stages(infos: Sequence[StageInfo], plans: Sequence[StagePlan], fingerprint: str) -> None:
    """Raises StageError naming the first stage that does not belong to the others."""
    for info in infos:
        if info.fingerprint != fingerprint:
            raise StageError(
                f"{info.model} loaded another checkpoint: its fingerprint is {info.fingerprint[:12]}, the "
                f"orchestrator's {fingerprint[:12]}; give every model the same DEEPSTACK_CHECKPOINT"
            )
        if info.dtype != infos[0].dtype:
            raise StageError(f"{info.model} computes in {info.dtype}, {infos[0].model} in {infos[0].dtype}")
    for info, plan in zip(infos[1:], plans, strict=True):
        if (info.first_layer, info.end_layer) != (plan.first_layer, plan.end_layer):
            raise StageError(
                f"{info.model} holds the layers {info.first_layer} to {info.end_layer}, the orchestrator expects "
                f"{plan.first_layer} to {plan.end_layer}; give every model the same DEEPSTACK_SPLIT_POINTS"
            )
        if info.block_size != infos[1].block_size:
            raise StageError(f"{info.model} has KV blocks of {info.block_size} tokens, {infos[1].model} of others")


def _no_rows(port: StagePort, interface: ModelInterface) -> dict[str, Handle]:
    """The required inputs of a stage with no rows; Triton wants them even where nothing is computed."""
    return {spec.name: port.empty(spec) for spec in interface.inputs if not spec.optional}
