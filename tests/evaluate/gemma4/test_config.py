"""Which decoders config.json describes, and which are refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from qatpack.checkpoint.errors import ModelError
from qatpack.evaluate.gemma4.config import FULL, SLIDING, read_config, tensor_shapes

from .conftest import DATA, FAMILY


def raw_config(name: str) -> dict[str, Any]:
    return json.loads((DATA / f"{name}_config.json").read_text())


def test_e2b_layers_are_the_published_ones() -> None:
    config = read_config(DATA / "e2b_config.json")
    assert [i for i, x in enumerate(config.layers) if x.kind == FULL] == [4, 9, 14, 19, 24, 29, 34]
    assert config.first_shared == 15
    assert [config.layers[i].kv_from for i in (15, 19, 34)] == [13, 14, 14]
    assert (config.layers[14].intermediate, config.layers[15].intermediate) == (6144, 12288)
    assert (config.layers[0].head_dim, config.layers[4].head_dim) == (256, 512)


def test_every_text_tensor_of_e2b_is_expected_with_its_shape() -> None:
    prefix = "model.language_model."
    listed = {
        t["name"].removeprefix(prefix): tuple(t["shape"])
        for t in json.loads((DATA / "e2b_tensors.json").read_text())
        if t["name"].startswith(prefix)
    }
    assert tensor_shapes(read_config(DATA / "e2b_config.json")) == listed


def test_global_layers_of_31b_have_their_own_heads_and_no_v_proj() -> None:
    config = read_config(DATA / "31b_config.json")
    full, sliding = config.layers[5], config.layers[0]
    assert (full.kv_heads, full.head_dim, full.v_proj) == (4, 512, False)
    assert (sliding.kv_heads, sliding.head_dim, sliding.v_proj, sliding.kind) == (
        16, 256, True, SLIDING,
    )  # fmt: skip


@pytest.mark.parametrize("name", FAMILY)
def test_text_only_and_per_layer_config_forms_say_the_same(name: str) -> None:
    raw = raw_config(name)
    modern = AutoConfig.for_model(**copy.deepcopy(raw["text_config"])).to_dict()
    assert "per_layer_config" in modern
    modern = json.loads(json.dumps(modern))
    assert read_config(raw["text_config"]) == read_config(raw)
    assert read_config(modern) == read_config(raw)


def test_a_mixture_of_experts_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match="mixture-of-experts"):
        read_config(DATA / "26b_a4b_config.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "model_type 'llama'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"use_bidirectional_attention": "all"}, "not a causal decoder"),
        ({"hidden_activation": "silu"}, "hidden_activation 'silu'"),
        ({"num_kv_shared_layers": 35}, "no sliding_attention layer makes any"),
        ({"num_key_value_heads": 3}, "do not divide"),
        ({"rope_parameters": {FULL: {"rope_type": "yarn"}}}, "rope_type 'yarn'"),
        ({"layer_types": ["linear_attention"] * 35}, "unknown type"),
        ({"num_hidden_layers": "35"}, "a whole number from 1"),
        ({"num_hidden_layers": 10**9}, "a whole number from 1"),
        ({"sliding_window": 1.5}, "a whole number from 1"),
        ({"sliding_window": None}, "a whole number from 1"),
        ({"global_head_dim": 10**30}, "a whole number from 1"),
        ({"head_dim": None}, "a whole number from 1"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps is 'x', expected a number above 0"),
        ({"rms_norm_eps": float("nan")}, "expected a number above 0"),
        ({"final_logit_softcapping": 0}, "expected a number above 0"),
        ({"final_logit_softcapping": 10**30 * 10**30}, "expected a number above 0"),
        ({"tie_word_embeddings": [1]}, "expected true or false"),
        ({"text_config": "x"}, "text_config is 'x', expected an object"),
        ({"rope_parameters": {FULL: {"rope_theta": 0}}}, "rope_theta is 0"),
        (
            {"rope_parameters": {FULL: {"rope_theta": 1e6, "partial_rotary_factor": 1.5}}},
            "expected at most 1",
        ),
        ({"layer_types": [FULL]}, "makes no sense"),
        ({"rope_parameters": {FULL: 3}}, "makes no sense"),
        ({"per_layer_config": [1]}, "makes no sense"),
        ({"per_layer_config": {"04": {"head_dim": 1.5}}}, "head_dim is 1.5, expected a whole"),
    ],
)
def test_what_cannot_run_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_config(raw_config("e2b")["text_config"] | change)


def test_whole_numbers_beyond_int64_are_numbers_like_others() -> None:
    text = raw_config("e2b")["text_config"]
    config = read_config(text | {"rms_norm_eps": 10**30, "final_logit_softcapping": 10**30})
    assert (type(config.eps), type(config.softcap)) == (float, float)


def test_a_config_that_is_missing_broken_or_incomplete(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json: not found"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="where an object belongs"):
        read_config(tmp_path)
    with pytest.raises(ModelError, match="lacks 'hidden_size'"):
        read_config({"model_type": "gemma4_text", "num_hidden_layers": 0} | {
            k: v for k, v in raw_config("e2b")["text_config"].items()
            if k not in ("hidden_size",)})  # fmt: skip
