import json

import pytest
import tiny

from qatpack.checkpoint.errors import CheckpointError
from qatpack.repack.config import output_config, quantization_config

SOURCE = json.loads((tiny.DATA / "e2b_config.json").read_text())


def test_the_rest_of_the_config_stays_to_the_byte():
    config = output_config(SOURCE, ["lm_head"])
    del config["quantization_config"]
    assert (json.dumps(config, indent=2) + "\n").encode() == (
        tiny.DATA / "e2b_config.json"
    ).read_bytes()


def test_it_says_what_googles_export_says():
    """But for the observer, which chose the steps there and has no part in ours."""
    google = json.loads((tiny.DATA / "e2b_w4a16_ct_config.json").read_text())["quantization_config"]
    ours = quantization_config(google["ignore"])
    weights = ours["config_groups"]["group_0"].pop("weights")
    theirs = google["config_groups"]["group_0"].pop("weights")
    assert weights.items() <= theirs.items()
    assert all(theirs[key] in (None, {}, "memoryless_minmax") for key in theirs.keys() - weights)
    assert ours.items() <= google.items()


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("old", [{"bits": 4}, {"quant_method": "gptq"}, "garbage", None, []])
def test_exactly_one_quantization_config(nested, old):
    source = json.loads(json.dumps(SOURCE))
    (source["text_config"] if nested else source)["quantization_config"] = old
    source["vision_config"]["compression_config"] = {"x": 1}
    text = json.dumps(output_config(source, ["lm_head"]))
    assert text.count("quantization_config") == 1
    assert "compression_config" not in text


def test_the_source_is_not_changed():
    source = json.loads(json.dumps(SOURCE))
    output_config(source, ["lm_head"], text_only=True)
    assert source == SOURCE


def test_text_only_is_the_text_config_under_the_causal_class():
    config = output_config(SOURCE, ["lm_head"], text_only=True)
    assert config["architectures"] == ["Gemma4ForCausalLM"]
    assert config["model_type"] == "gemma4_text"
    assert config["tie_word_embeddings"] is True
    assert SOURCE["text_config"].items() <= config.items()
    assert "vision_config" not in config


@pytest.mark.parametrize(("top", "inner"), [(True, False), (False, True), (None, False)])
def test_text_only_says_once_whether_the_head_is_tied(top, inner):
    source = json.loads(json.dumps(SOURCE))
    source["text_config"]["tie_word_embeddings"] = inner
    source["text_config"]["architectures"] = None
    if top is None:
        del source["tie_word_embeddings"]
    else:
        source["tie_word_embeddings"] = top
    config = output_config(source, ["lm_head"], text_only=True)
    assert config["tie_word_embeddings"] == (inner if top is None else top)
    assert config["architectures"] == ["Gemma4ForCausalLM"]


@pytest.mark.parametrize("broken", [{"text_config": "x"}, {"text_config": {}, "architectures": 3}])
def test_text_only_of_a_broken_config(broken):
    with pytest.raises(CheckpointError, match="text_config"):
        output_config(broken, [], text_only=True)


def test_compressed_tensors_takes_it_as_its_own():
    from compressed_tensors.quantization import QuantizationConfig

    for pack_ple in (False, True):
        ours = quantization_config(["lm_head"], pack_ple=pack_ple)
        parsed = QuantizationConfig.model_validate(ours)
        assert parsed.format == "pack-quantized"
        for group in parsed.config_groups.values():
            weights = group.weights
            assert (weights.num_bits, weights.group_size, weights.symmetric) == (4, 32, True)
            assert weights.strategy == "group"
            assert weights.actorder is None
