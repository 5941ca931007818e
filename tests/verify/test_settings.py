"""What stands beside the weights is held against the reference's too."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file
from verify_builds import read_arrays

from qatpack.checkpoint.source import resolve_source
from qatpack.repack.job import repack
from qatpack.repack.plan import Options as RepackOptions
from qatpack.verify.findings import Severity
from qatpack.verify.job import Options, verify

QUICK = Options(conformance=False)
NORM = "model.norm.weight"


def run(folder, reference):
    return verify(resolve_source(folder), reference, QUICK)


def codes(report, severity=Severity.ERROR):
    return {f.code for f in report.findings if f.severity is severity}


@pytest.mark.parametrize(
    "change",
    [
        {"final_logit_softcapping": 5},
        {"rms_norm_eps": 0.1},
        {"sliding_window": 1},
        {"layer_types": ["full_attention"] * 6},
        {"tie_word_embeddings": False},
        {"rope_parameters": {"full_attention": {"rope_theta": 7.0}}},
    ],
)
def test_a_setting_of_the_model_that_is_not_the_references(edited, reference, change):
    folder = edited("float32", config=lambda c: c["text_config"].update(change), manifest=False)
    report = run(folder, reference)
    assert "config-differs" in codes(report)
    assert next(iter(change)) in str(next(f for f in report.findings if f.code == "config-differs"))
    assert not report.passed
    assert not report.judgement.good
    assert "but 1 error in the folder" in report.judgement.text or len(codes(report)) > 1


def test_what_every_tool_rewrites_is_no_finding(edited, reference):
    folder = edited("float32", config=lambda c: c.update(transformers_version="9"), manifest=False)
    report = run(folder, reference)
    assert report.passed
    assert not codes(report, Severity.WARNING)
    folder = edited("bfloat16", config=lambda c: c.update(auto_map={"x": "y"}), manifest=False)
    assert codes(run(folder, reference), Severity.WARNING) == {"config-keys"}


def test_a_text_only_build_is_held_against_the_text_config(tmp_path, reference):
    options = RepackOptions(text_only=True, scale_dtype="float32")
    repack(reference.source, tmp_path / "text", options)
    assert run(tmp_path / "text", reference).passed
    path = tmp_path / "text" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"rms_norm_eps": 0.1}))
    assert "config-differs" in codes(run(tmp_path / "text", reference))


def test_sidecars_that_are_garbage_or_another(edited, reference):
    folder = edited("float32", manifest=False)
    (folder / "tokenizer.json").write_text("garbage {")
    (folder / "chat_template.jinja").write_text("evil")
    generation = folder / "generation_config.json"
    generation.write_text(json.dumps(json.loads(generation.read_text()), indent=7))
    report = run(folder, reference)
    assert codes(report) == {"file-damaged"}
    differ = [f.where for f in report.findings if f.code == "file-differs"]
    assert [w.rpartition("/")[2] for w in differ] == ["chat_template.jinja"]


def test_one_tensor_under_two_names(tmp_path, reference):
    """Readers of the text-only class load the changed norm; the decoy holds the true bytes."""
    options = RepackOptions(text_only=True, scale_dtype="float32")
    repack(reference.source, tmp_path / "text", options)
    arrays = read_arrays(tmp_path / "text")
    arrays["model.language_model.norm.weight"] = arrays[NORM]
    arrays[NORM] = (arrays[NORM].astype(np.float32) * 2).astype(arrays[NORM].dtype)
    save_file(arrays, tmp_path / "text" / "model.safetensors", {"format": "pt"})
    (tmp_path / "text" / "repack_report.json").unlink()
    report = run(tmp_path / "text", reference)
    assert "name-twice" in codes(report)
    assert not report.judgement.good


@pytest.mark.parametrize("suffix", ["bias", "input_scale", "weight_packed_x", "weight"])
def test_any_extra_tensor_of_a_packed_module(edited, reference, suffix):
    module = "model.language_model.layers.0.mlp.down_proj"

    def add(arrays):
        arrays[f"{module}.{suffix}"] = np.zeros(4, np.float32)

    report = run(edited("float32", add, manifest=False), reference)
    assert "extra-tensor" in codes(report)


@pytest.mark.parametrize(
    "change",
    [
        lambda q: q.update(sparsity_config={"format": "sparse-24-bitmask"}),
        lambda q: q.update(transform_config={"config_groups": {"r": {"type": "hadamard"}}}),
        lambda q: q["config_groups"]["group_0"].update(output_activations={"num_bits": 8}),
    ],
)
def test_a_scheme_that_does_more_than_pack(edited, reference, change):
    folder = edited("float32", config=lambda c: change(c["quantization_config"]), manifest=False)
    assert not run(folder, reference).passed


def test_reference_groups_on_no_grid_are_no_exact_levels(edited, reference, tmp_path):
    import shutil

    from qatpack.verify.job import open_reference

    name = "model.language_model.layers.0.mlp.gate_proj.weight"
    source = tmp_path / "noisy"
    shutil.copytree(reference.source.folder, source)
    arrays = read_arrays(source)
    arrays[name] = arrays[name].copy()
    arrays[name][:20] = np.random.default_rng(0).normal(0, 0.02, (20, arrays[name].shape[1]))
    save_file(arrays, source / "model.safetensors")
    report = run(edited("float32", manifest=False), open_reference(resolve_source(source)))
    assert "off-grid" in codes(report)
    assert "levels all exact" not in report.judgement.text
