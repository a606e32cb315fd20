"""The audit's request parameters: refused unless a setting allows them, and what they do to one request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from deepstack_serving.audit_protocol import AUDIT_DESCRIBE, AUDIT_EXECUTION, AUDIT_ZERO, ServerDescription
from deepstack_serving.stages.info import StageInfo
from tests.support.asking import ONE_IMAGE, TEXT, Answer, Ask, answer, submit
from tests.support.local import CollectingReply, LocalServer, keep, local_settings, zero_deepstack
from tests.support.tiny import TinyShape, write_checkpoint


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[LocalServer]:
    """It takes the parameters. Three deepstack levels, of the layers 0, 1 and 2."""
    with LocalServer(local_settings(checkpoint, audit_parameters=True)) as local:
        yield local


def ask(local: LocalServer, question: Ask, **parameters: Any) -> CollectingReply:
    """`submit` with request parameters beside the sampling parameters."""
    inputs = {**question.inputs, "sampling_parameters": ['{"max_tokens": 4, "ignore_eos": true, "logprobs": 5}']}
    return local.submit(inputs, **parameters).wait()


def zeroed(local: LocalServer, layers: str, question: Ask = ONE_IMAGE) -> Answer:
    return answer(ask(local, question, audit_zero=layers))


def refusal(reply: CollectingReply) -> str:
    assert reply.error is not None
    return reply.error.to_wire()


@pytest.mark.parametrize("name", [AUDIT_ZERO, AUDIT_EXECUTION, AUDIT_DESCRIBE])
def test_server_without_the_setting_refuses_them_by_its_name(checkpoint: Path, name: str) -> None:
    with LocalServer(local_settings(checkpoint)) as local:
        text = refusal(ask(local, TEXT, **{name: "all"}))
    assert text.startswith(f"[INVALID_ARG] unknown request parameter '{name}'")
    assert "'audit_parameters' = true" in text


def test_zeroing_all_is_what_an_encoder_of_zeros_gives(server: LocalServer, checkpoint: Path) -> None:
    with LocalServer(local_settings(checkpoint), change=zero_deepstack) as control:
        expected = answer(ask(control, ONE_IMAGE))
    assert zeroed(server, "all") == zeroed(server, "0,1,2") == expected
    assert expected != answer(ask(server, ONE_IMAGE))


def test_each_layer_alone_changes_another_thing(server: LocalServer) -> None:
    answers = [zeroed(server, "1"), zeroed(server, "0"), zeroed(server, "2"), answer(ask(server, ONE_IMAGE))]
    assert len({item.logprobs for item in answers}) == 4


def test_zeroing_is_of_one_request_only(server: LocalServer) -> None:
    before = answer(ask(server, ONE_IMAGE))
    zeroed(server, "all")
    assert answer(ask(server, ONE_IMAGE)) == before
    assert zeroed(server, "all", TEXT) == answer(ask(server, TEXT))


@pytest.mark.parametrize("layers", ["3", "all,0", "0,", "", "0;1", "-1", True])
def test_layers_without_features_are_refused_with_those_that_have(server: LocalServer, layers: object) -> None:
    text = refusal(ask(server, ONE_IMAGE, audit_zero=layers))
    assert text == (
        f"[INVALID_ARG] request parameter 'audit_zero' is {layers!r}; allowed: 'all', or numbers of [0, 1, 2] "
        "separated by commas"
    )


@pytest.mark.parametrize(("name", "value"), [(AUDIT_EXECUTION, "compiled"), (AUDIT_DESCRIBE, "yes")])
def test_other_values_are_refused_by_name(server: LocalServer, name: str, value: str) -> None:
    assert f"request parameter '{name}' is '{value}'; allowed: " in refusal(ask(server, TEXT, **{name: value}))


def test_unknown_parameters_are_refused_as_ever(server: LocalServer) -> None:
    assert "unknown request parameter 'audit_zeros'" in refusal(ask(server, TEXT, audit_zeros="all"))


def test_graphs_are_refused_where_no_stage_runs_them(server: LocalServer) -> None:
    answer(ask(server, TEXT))  # the stages have said what they run
    text = refusal(ask(server, TEXT, audit_execution="graph"))
    assert text.startswith("[INVALID_ARG] request parameter 'audit_execution' is 'graph', but no language stage")


def test_eager_steps_say_so_to_every_language_stage(server: LocalServer) -> None:
    expected = answer(ask(server, ONE_IMAGE))
    server.port.calls.clear()
    assert answer(ask(server, ONE_IMAGE, audit_execution="eager")) == expected
    eager = {model for model, inputs in server.port.calls if "eager" in inputs}
    assert eager == set(server.port.language)
    server.port.calls.clear()
    answer(submit(server, ONE_IMAGE))
    assert not any("eager" in inputs for _, inputs in server.port.calls)


def test_description_is_what_the_stages_say(server: LocalServer) -> None:
    reply = ask(server, TEXT, audit_describe="true")
    described = ServerDescription.from_json(reply.text)
    assert [stage.model for stage in described.stages] == ["vision_encoder", "language_early", "language_late"]
    assert {(stage.device, stage.dtype, stage.execution) for stage in described.stages} == {("cpu", "FP32", "eager")}
    assert (described.deepstack_layers, described.executions, described.is_compiled) == ((0, 1, 2), ("eager",), False)
    assert (reply.finals, reply.tokens) == (1, [])


def test_checkpoint_without_deepstack_has_nothing_to_zero(tmp_path: Path) -> None:
    plain = write_checkpoint(tmp_path / "plain", TinyShape(deepstack_indexes=()))
    with LocalServer(local_settings(plain, audit_parameters=True)) as local:
        assert zeroed(local, "all") == answer(ask(local, ONE_IMAGE))
        assert "this checkpoint has no deepstack layers" in refusal(ask(local, ONE_IMAGE, audit_zero="0"))
        assert ServerDescription.from_json(ask(local, TEXT, audit_describe="true").text).deepstack_layers == ()


def in_graphs(model: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
    if name != "stage_info" or model != "language_late":
        return keep(model, name, tensor)
    return replace(StageInfo.from_bytes(bytes(tensor.tolist())), execution="graph", compiled=True).to_tensor()


def test_one_stage_with_graphs_is_enough_to_ask_for_them(checkpoint: Path) -> None:
    settings = local_settings(checkpoint, audit_parameters=True, prefill_graph_tokens="128,512")
    with LocalServer(settings, change=in_graphs) as local:
        answer(ask(local, TEXT))
        described = ServerDescription.from_json(ask(local, TEXT, audit_describe="true").text)
        assert answer(ask(local, TEXT, audit_execution="graph")) == answer(ask(local, TEXT))
    assert (described.executions, described.is_compiled) == (("eager", "graph"), True)
    assert described.largest_prefill_graph == 512
