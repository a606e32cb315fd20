"""Random checkpoints of the GPU benchmark: small ones of every family load whole and by stages, and stay finite."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForImageTextToText

from bench.failures import BenchError
from bench.gpu.checkpoint import ensure_checkpoint, write_config
from bench.gpu.shapes import SHAPES, Shape, shape
from bench.gpu.weights import plan_shards, random_weight, write_weights
from deepstack_serving.attention import ATTENTION
from deepstack_serving.checkpoint import open_checkpoint, open_config
from deepstack_serving.injection import plan_stages
from deepstack_serving.prompt.tokenizer import PromptTokenizer
from deepstack_serving.stages.loading import load_language_stage, load_vision_stage
from tests.support.layouts import INDEX

_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "num_attention_heads": 2}
_GRANITE_TEXT = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 24, "num_attention_heads": 4}
_GRANITE_VISION = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 20, "num_attention_heads": 1}


def small(name: str) -> Shape:
    """The shape with widths of the tiny one, so that a test can hold it; its names and layouts are the real ones."""
    real, tiny = shape(name), copy.deepcopy(dict(shape("tiny").config))
    config = copy.deepcopy(dict(real.config))
    if name == "granite-4b":
        config["text_config"] |= {**_GRANITE_TEXT, "num_key_value_heads": 2, "vocab_size": 2048}
        config["vision_config"] |= _GRANITE_VISION
        return dataclasses.replace(real, config=config, vocabulary=1024)
    for part in ("text_config", "vision_config"):
        config[part] |= {key: value for key, value in tiny[part].items() if key not in ("model_type", "dtype")}
    config["text_config"] |= _EXPERTS if name == "30b-a3b" else {}
    config["text_config"]["tie_word_embeddings"] = real.config["tie_word_embeddings"]
    return dataclasses.replace(real, config=config, vocabulary=2014)


@pytest.fixture(scope="module", params=[name for name in SHAPES if name != "tiny"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target: Path = tmp_path_factory.mktemp("shapes") / request.param
    ensure_checkpoint(small(request.param), target, None, "cpu")
    return target


def test_the_whole_model_loads_without_a_missing_or_unknown_weight(folder: Path) -> None:
    model, report = AutoModelForImageTextToText.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    names = json.loads((folder / INDEX).read_text())["weight_map"]
    assert ("lm_head.weight" in names) != bool(getattr(model.config, "tie_word_embeddings", False))
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([[1, 2, 3]])).logits
    assert bool(logits.isfinite().all()) and logits.float().std() > 0.1


def test_both_stages_and_the_encoder_load(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    load_vision_stage(checkpoint, "cpu")
    for plan in plan_stages(checkpoint.layer_count, 2, None, checkpoint.deepstack_layers):
        load_language_stage(checkpoint, plan, "cpu", ATTENTION)


def test_processor_agrees_with_the_model_and_digits_are_tokens(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    assert checkpoint.family.image_processing(folder).token_count(1024, 1024) > 1000
    tokenizer = PromptTokenizer(folder, checkpoint.family.placeholder_ids(checkpoint.config))
    assert len(tokenizer.encode_raw("0123456789" * 3)) == 30


@pytest.mark.parametrize("name", SHAPES)
def test_real_config_takes_the_ids_of_the_tokenizer(name: str, tmp_path: Path) -> None:
    wanted = shape(name)
    tokenizer = Tokenizer.from_str(_tokenizer_text(wanted))
    write_config(wanted, tokenizer, tmp_path)

    checkpoint = open_config(tmp_path)
    assert checkpoint.family.image_token_id(checkpoint.config) == tokenizer.token_to_id(wanted.form.image)
    assert tokenizer.get_vocab_size() <= wanted.config["text_config"]["vocab_size"]
    assert checkpoint.dtype == torch.bfloat16


def test_ids_of_placeholders_are_those_of_the_real_checkpoint() -> None:
    wanted = shape("8b")
    ids = dict(zip(wanted.form.special, range(151_643, wanted.vocabulary), strict=True))
    assert {key: ids[token] for key, token in wanted.form.config_ids.items()} == {
        key: wanted.config[key] for key in wanted.form.config_ids
    }


def test_given_tokenizer_without_the_placeholders_is_refused(tmp_path: Path) -> None:
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "tokenizer.json").write_text(_tokenizer_text(shape("granite-4b")))
    with pytest.raises(BenchError, match=r"has no <\|image_pad\|>"):
        ensure_checkpoint(shape("tiny"), tmp_path / "checkpoint", tmp_path / "given", "cpu")


def test_weights_are_the_same_however_they_are_cut(tmp_path: Path) -> None:
    shapes = {"a.weight": (4, 8), "b.bias": (8,), "b.norm.weight": (8,)}
    for name, size in (("one", 1 << 20), ("three", 1)):
        (tmp_path / name).mkdir()
        write_weights(tmp_path / name, shapes, "cpu", size)
    places = json.loads((tmp_path / "three" / INDEX).read_text())["weight_map"]
    (whole,) = (load_file(path) for path in (tmp_path / "one").glob("*.safetensors"))
    assert len(set(places.values())) == 3
    for name, file in places.items():
        assert torch.equal(load_file(tmp_path / "three" / file)[name], whole[name])


def test_shards_are_cut_before_they_grow_too_large() -> None:
    assert plan_shards({"a": (10,), "b": (10,), "c": (100,), "d": (1,)}, 40) == [["a", "b"], ["c"], ["d"]]


def test_norms_are_near_one_and_matrices_keep_the_size_of_activations() -> None:
    norm: Any = random_weight("input_layernorm.weight", (4096,), 1, "cpu").float()
    matrix: Any = random_weight("q_proj.weight", (64, 4096), 1, "cpu").float()
    assert norm.mean() == pytest.approx(1, abs=0.01)
    assert matrix.std() * 64 == pytest.approx(1.2, abs=0.02)


def _tokenizer_text(wanted: Shape) -> str:
    special = [
        {"id": wanted.vocabulary - len(wanted.form.special) + place, "content": token}
        for place, token in enumerate(wanted.form.special)
    ]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{**token, **flags, "special": True} for token in special]
    vocabulary = {token["content"]: token["id"] for token in special}
    return json.dumps(
        {"version": "1.0", "added_tokens": added, "model": {"type": "BPE", "vocab": vocabulary, "merges": []}}
    )
