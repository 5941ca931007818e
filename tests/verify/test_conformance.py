"""The folder's own checks. Those that need torch stand in the second half and share its import."""

import json
import shutil
import sys

import numpy as np
import pytest
import tiny
from safetensors.numpy import save_file
from verify_builds import DEMO, DTYPES, read_arrays

from qatpack.checkpoint.source import resolve_source
from qatpack.demo import rerounded
from qatpack.repack.job import repack
from qatpack.repack.plan import Options as RepackOptions
from qatpack.verify.build import open_build
from qatpack.verify.findings import Severity
from qatpack.verify.job import Options, verify
from qatpack.verify.readers import (
    file_findings,
    generation_findings,
    limit_findings,
    tensor_findings,
)
from qatpack.verify.scheme import read_scheme, size_findings

LAYER = "model.language_model.layers.1."
Q = f"{LAYER}self_attn.q_proj"


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    root = tmp_path_factory.mktemp("tiny")
    tiny.write(root / "source")
    repack(resolve_source(root / "source"), root / "build")
    return root / "build"


@pytest.fixture
def changed(build, tmp_path):
    """A copy of the tiny build with other tensors or another config."""

    def make(tensors=None, config=None):
        folder = tmp_path / "b"
        shutil.copytree(build, folder)
        if tensors is not None:
            arrays = read_arrays(folder)
            tensors(arrays)
            save_file(arrays, folder / "model.safetensors")
        if config is not None:
            path = folder / "config.json"
            value = json.loads(path.read_text())
            config(value)
            path.write_text(json.dumps(value))
        return folder

    return make


def found(findings, severity=Severity.ERROR):
    return {f.code for f in findings if f.severity is severity}


def scheme_of(folder):
    opened = open_build(folder)
    scheme, findings = read_scheme(opened.checkpoint.config)
    return [*findings, *size_findings(opened, scheme)]


def test_our_config_is_sound(build):
    assert scheme_of(build) == []


def weights(config):
    return config["quantization_config"]["config_groups"]["group_0"]["weights"]


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda c: c.pop("quantization_config"), "config.json"),
        (lambda c: c.update(quantization_config=[1]), "quantization_config"),
        (lambda c: c["text_config"].update(quantization_config={}), "text_config."),
        (lambda c: c.update(compression_config={}), "compression_config"),
        (lambda c: c["quantization_config"].pop("quantization_status"), "quantization_status"),
        (lambda c: c["quantization_config"].update(quantization_status="frozen"), "status"),
        (lambda c: c["quantization_config"].update(quant_method="gptq"), "quant_method"),
        (lambda c: c["quantization_config"].update(format="int-quantized"), "format"),
        (lambda c: c["quantization_config"].update(config_groups=[]), "config_groups"),
        (lambda c: c["quantization_config"].update(config_groups={"a": 3}), "config_groups.a"),
        (lambda c: c["quantization_config"].update(ignore={"a": 1}), "ignore"),
        (lambda c: c["quantization_config"].update(ignore=["lm_head", 3]), "ignore"),
        (lambda c: c["quantization_config"].update(kv_cache_scheme={"x": 1}), "kv_cache_scheme"),
        (lambda c: weights(c).update(num_bits=8), "num_bits"),
        (lambda c: weights(c).update(num_bits="4"), "num_bits"),
        (lambda c: weights(c).update(symmetric=False), "symmetric"),
        (lambda c: weights(c).update(symmetric=1), "symmetric"),
        (lambda c: weights(c).update(type="float"), "type"),
        (lambda c: weights(c).update(strategy="tensor"), "strategy"),
        (lambda c: weights(c).update(actorder="group"), "actorder"),
    ],
)
def test_a_wrong_config(changed, change, where):
    findings = [f for f in scheme_of(changed(config=change)) if f.code == "config"]
    assert any(where in f.where for f in findings)
    assert all(f.severity is Severity.ERROR and f.do for f in findings)


def test_other_group_sizes_than_stated(changed):
    assert found(scheme_of(changed(config=lambda c: weights(c).update(group_size=64)))) == {
        "group-size"
    }


def test_one_group_a_row(changed):
    def channel(arrays):
        for name in [n for n in arrays if n.endswith("weight_scale")]:
            arrays[name] = np.ascontiguousarray(arrays[name][:, :1])

    folder = changed(channel, lambda c: weights(c).update(strategy="channel", group_size=None))
    assert found(scheme_of(folder)) == set()


def test_an_anchored_pattern_is_a_warning(changed):
    folder = changed(
        config=lambda c: c["quantization_config"]["ignore"].append("re:model.vision_tower.*")
    )
    assert found(scheme_of(folder), Severity.WARNING) == {"config-pattern"}


def test_extra_tensors_and_mixed_partners(changed):
    def extra(arrays):
        arrays[f"{Q}.weight"] = tiny.noise(np.random.default_rng(0), 64, 64)

    assert found(tensor_findings(open_build(changed(extra)))) == {"extra-tensor"}


def test_fused_partners_packed_in_part(changed):
    def unpack(arrays):
        for part in ("packed", "scale", "shape"):
            arrays.pop(f"{Q}.weight_{part}")
        arrays[f"{Q}.weight"] = tiny.noise(np.random.default_rng(0), 64, 64)

    assert found(tensor_findings(open_build(changed(unpack)))) == {"fused-mixed"}


def test_limits_of_readers_name_them(changed):
    def widen(arrays):
        for name in [n for n in arrays if n.endswith("weight_scale")]:
            arrays[name] = arrays[name].astype(np.float32)

    opened = open_build(changed(widen))
    notes = list(limit_findings(opened, negative_scales=3))
    assert {n.code for n in notes} == {"scale-dtype", "scale-negative", "kernel", "shared-kv"}
    assert all(n.severity is Severity.NOTE for n in notes)
    assert all("vLLM 0.32" in n.what or "tpu-inference 0.32" in n.what for n in notes)


def test_packed_embeddings(changed):
    def pack(name):
        def change(arrays):
            table = arrays.pop(f"model.language_model.{name}.weight")
            arrays |= rerounded.packed_tensors(
                f"model.language_model.{name}", *rerounded.reround(table)
            )

        return change

    ple = open_build(changed(pack("embed_tokens_per_layer")))
    assert "embedding-packed" in found(limit_findings(ple, negative_scales=0), Severity.NOTE)
    shutil.rmtree(ple.folder)
    tokens = open_build(changed(pack("embed_tokens")))
    assert "embedding-packed" in found(limit_findings(tokens, negative_scales=0))


def test_files_that_were_lost_are_errors(build, tmp_path):
    reference = tmp_path / "reference"
    tiny.write(reference)
    (reference / "tokenizer.json").write_text("{}")
    folder = tmp_path / "b"
    shutil.copytree(build, folder)
    opened = open_build(folder)
    assert found(file_findings(opened, reference)) == {"file-missing"}
    (reference / "tokenizer.json").unlink()
    assert found(file_findings(opened, reference)) == set()
    assert found(file_findings(opened, reference), Severity.WARNING) == {"file-missing"}
    (folder / "processor_config.json").unlink()
    lost = [f for f in file_findings(opened, reference) if f.severity is Severity.ERROR]
    assert [f.where for f in lost] == [f"{opened.name}/processor_config.json"]


@pytest.mark.parametrize(
    ("content", "severity"),
    [
        ('{"eos_token_id": [106, 50]}', Severity.WARNING),
        ('{"eos_token_id": [1, 106], "bos_token_id": 3}', Severity.WARNING),
        ('{"eos_token_id": [1, 106, 99999999]}', Severity.WARNING),
        ('{"eos_token_id": "1"}', Severity.ERROR),
        ('{"eos_token_id": [1, "106"]}', Severity.ERROR),
        ('{"temperature": "hot"}', Severity.ERROR),
        ('{"top_k": 6.5}', Severity.ERROR),
        ('{"do_sample": 1}', Severity.ERROR),
        ("[]", Severity.ERROR),
        ("{", Severity.ERROR),
    ],
)
def test_generation_config(changed, content, severity):
    folder = changed()
    (folder / "generation_config.json").write_text(content)
    assert found(generation_findings(open_build(folder)), severity) == {"generation"}


def test_an_agreeing_generation_config(build):
    opened = open_build(build)
    wrong = [f for f in generation_findings(opened) if "vocabulary" not in f.what]
    assert wrong == []


GARBAGE = [
    {},
    {"quantization_config": {"config_groups": {"g": {"targets": 1, "weights": {"num_bits": []}}}}},
    {"text_config": 3, "vision_config": [], "tie_word_embeddings": "no", "eos_token_id": {}},
    {"text_config": {"num_hidden_layers": "x", "num_kv_shared_layers": -1}, "architectures": 5},
    {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "text_config": {"num_hidden_layers": 10**9, "model_type": "gemma4_text"},
    },
    {"architectures": ["os"], "model_type": ["gemma4"], "quantization_config": {"ignore": "re:("}},
]


@pytest.mark.parametrize("config", GARBAGE)
def test_garbage_configs_give_findings(changed, config):
    folder = changed()
    (folder / "config.json").write_text(json.dumps(config))
    report = verify(resolve_source(folder), None, Options(conformance=False))
    assert not report.passed
    json.dumps(report.to_json(), allow_nan=False)


def test_nan_scales_are_found_without_a_reference(changed):
    def spoil(arrays):
        arrays[f"{Q}.weight_scale"][0, 0] = np.nan

    report = verify(resolve_source(changed(spoil)), None, Options(conformance=False))
    assert "scale-not-finite" in found(report.findings)


# From here on torch, transformers and compressed-tensors are imported, once.


def whole(folder):
    report = verify(resolve_source(folder))
    return report, found(report.findings)


@pytest.mark.parametrize("name", [*DTYPES, "rerounded"])
def test_our_builds_conform(builds, name, capfd):
    report, errors = whole(builds[name])
    assert errors == set()
    assert report.passed
    assert len(report.checks) == 7
    assert any("Gemma4ForConditionalGeneration" in check for check in report.checks)
    assert capfd.readouterr() == ("", "")


def test_an_ignore_list_short_of_some_linears(edited):
    def shorten(config):
        ignore = config["quantization_config"]["ignore"]
        config["quantization_config"]["ignore"] = [n for n in ignore if "audio_tower" not in n]

    report, errors = whole(edited("bfloat16", config=shorten))
    assert errors == {"ignore-short"}
    finding = next(f for f in report.findings if f.code == "ignore-short")
    assert "model.audio_tower." in finding.what
    assert not report.passed


def test_a_packed_module_that_is_ignored(edited):
    folder = edited("bfloat16", config=lambda c: c["quantization_config"]["ignore"].append(Q))
    assert whole(folder)[1] == {"ignore-long"}


def test_lm_head_not_ignored(edited):
    folder = edited(
        "bfloat16", config=lambda c: c["quantization_config"]["ignore"].remove("lm_head")
    )
    assert whole(folder)[1] == {"ignore-short"}


def test_a_schema_that_compressed_tensors_refuses(edited):
    def spoil(config):
        weights(config)["observer_kwargs"] = 3

    assert whole(edited("bfloat16", config=spoil))[1] == {"config-schema"}


def test_a_pattern_that_is_no_pattern(edited):
    folder = edited("bfloat16", config=lambda c: c["quantization_config"]["ignore"].append("re:("))
    assert "config-match" in whole(folder)[1]


def test_a_missing_norm_without_a_reference(edited):
    folder = edited("bfloat16", lambda a: a.pop(f"{LAYER}input_layernorm.weight"))
    assert whole(folder)[1] == {"tensor-missing"}


def test_an_unknown_architecture_is_matched_by_the_tensors(edited):
    def rename(config):
        config["architectures"] = ["Gemma9ForEverything"]

    report, errors = whole(edited("bfloat16", config=rename))
    assert errors == set()
    assert any("the tensors' names" in check for check in report.checks)
    (said,) = [f for f in report.findings if f.code == "model-unbuilt"]
    assert said.severity is Severity.NOTE
    assert "Gemma9ForEverything" in said.what


def test_other_shapes_than_the_config_describes(edited):
    def widen(config):
        config["text_config"]["intermediate_size"] *= 2

    report, errors = whole(edited("bfloat16", config=widen))
    assert errors == {"model-shape"}
    (said,) = [f for f in report.findings if f.code == "model-shape"]
    assert "mlp.down_proj.weight" in said.where
    assert "instead of" in said.what


def test_a_wrong_group_size_is_one_finding(edited):
    report, errors = whole(edited("bfloat16", config=lambda c: weights(c).update(group_size=64)))
    assert errors == {"group-size", "decode"}
    (said,) = [f for f in report.findings if f.code == "decode"]
    assert "cannot decode 51 modules" in said.what


def test_every_row_is_asked_of_compressed_tensors(builds, monkeypatch):
    """A decompressor that is wrong in one row in the middle of one tensor is found."""
    from qatpack.verify import decompressor

    real, seen = decompressor._decompress, []

    def spoiled(packed, scale, tensor, scheme):
        decoded = real(packed, scale, tensor, scheme)
        seen.append(len(packed))
        if tensor.module == Q:
            decoded[len(decoded) // 2, 0] ^= 1
        return decoded

    monkeypatch.setattr(decompressor, "_decompress", spoiled)
    monkeypatch.setattr(decompressor, "BLOCK_VALUES", 1 << 12)
    report, errors = whole(builds["bfloat16"])
    assert errors == {"decode"}
    (said,) = [f for f in report.findings if f.code == "decode"]
    assert said.where == Q
    rows = sum(t.rows for t in open_build(builds["bfloat16"]).packed.values())
    assert any(f"all {rows:,} rows" in check for check in report.checks)
    assert sum(seen) > 0.9 * rows


@pytest.mark.parametrize("config", GARBAGE)
def test_garbage_configs_do_not_upset_compressed_tensors(changed, config):
    folder = changed()
    (folder / "config.json").write_text(json.dumps(config))
    report, errors = whole(folder)
    assert errors
    assert "fault of qatpack" not in report.judgement.text


def test_nan_scales_decode_alike(edited):
    def spoil(arrays):
        arrays[f"{Q}.weight_scale"][0, 0] = np.nan

    assert whole(edited("float32", spoil))[1] == {"scale-not-finite"}


def test_rerounding_is_what_compressed_tensors_does():
    import torch
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    w = read_arrays(DEMO)["model.language_model.layers.0.mlp.gate_proj.weight"]
    args = QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=32)
    weight = torch.from_numpy(w.view(np.int16)).view(torch.bfloat16)
    groups = weight.reshape(len(w), -1, 32)
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    levels = quantize(weight, scale, zero, args, dtype=torch.int8)
    ours, step = rerounded.reround(w)
    assert np.array_equal(ours, levels.numpy())
    assert np.array_equal(step.view(np.int16), scale.view(torch.int16).numpy())


@pytest.mark.parametrize("name", ["bfloat16", "float32"])
def test_loading_in_transformers(builds, name):
    from qatpack.verify.load import load_in

    findings, checks = load_in("transformers", open_build(builds[name]))
    assert findings == []
    assert checks[0].startswith("loaded by transformers ")


def test_loading_a_broken_folder_is_told(edited):
    from qatpack.verify.load import load_in

    folder = edited("bfloat16", lambda a: a.pop(f"{Q}.weight_scale"))
    assert "load-keys" in found(load_in("transformers", open_build(folder))[0])
    frozen = edited("float32", config=lambda c: c["quantization_config"].pop("quantization_status"))
    assert found(load_in("transformers", open_build(frozen))[0]) & {"load-keys", "load"}


def test_a_text_only_build_conforms(tmp_path):
    repack(resolve_source(DEMO), tmp_path / "text", RepackOptions(text_only=True))
    report, errors = whole(tmp_path / "text")
    assert errors == set()
    assert any("Gemma4ForCausalLM" in check for check in report.checks)
    assert "torch" in sys.modules


def test_a_pattern_that_would_never_end_is_refused(edited):
    def add(config):
        config["quantization_config"]["ignore"].append("re:(.*_?.*)*(.+)+!$")

    report = verify(resolve_source(edited("float32", config=add)), None, Options())
    assert "config-match" in {finding.code for finding in report.findings}
