"""--rederive: what is proven, and every way in which a manifest or a folder can lie."""

import json
import shutil

import numpy as np
import pytest
import tiny
from safetensors.numpy import save_file
from verify_builds import read_arrays

from qatpack.checkpoint.hashing import hash_file
from qatpack.checkpoint.source import resolve_source
from qatpack.repack.job import repack
from qatpack.repack.plan import Options
from qatpack.verify.build import open_build
from qatpack.verify.job import open_reference
from qatpack.verify.provenance import rederive

Q = "model.language_model.layers.1.self_attn.q_proj"


@pytest.fixture
def pair(tmp_path):
    """A tiny source and its build, both free to be damaged."""
    tiny.write(tmp_path / "source")
    repack(resolve_source(tmp_path / "source"), tmp_path / "build")
    return tmp_path / "source", tmp_path / "build"


def run(pair, share=1.0):
    source, build = pair
    layout = open_reference(resolve_source(source)).layout
    done = []
    proof, findings = rederive(open_build(build), source, layout, share=share, progress=done.append)
    assert sum(done) >= 0
    return proof, findings


def codes(findings):
    return {f.code for f in findings}


def edit_manifest(build, change):
    path = build / "repack_report.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def rehash(build):
    """Make the manifest agree with the files again, as a careful forger would."""

    def change(manifest):
        for record in manifest["files"]:
            path = build / record["name"]
            record |= {"bytes": path.stat().st_size, "sha256": hash_file(path)}

    edit_manifest(build, change)


def test_an_honest_build_is_proven_whole(pair):
    proof, findings = run(pair)
    assert findings == []
    assert proof.unproven == ()
    assert proof.proven == (
        "8 source files have the recorded size and sha256",
        "9 output files have the recorded size and sha256",
        "6 files beside the weights are the source's bytes",
        "the 95 tensors are those that source and options give",
        "config.json is the one that source and options give",
        "26 of 26 packed modules derived again: bytes equal",
        "17 of 17 copied tensors compared: bytes equal",
    )


def test_a_share_says_what_it_left_open(pair):
    proof, findings = run(pair, share=0.2)
    assert findings == []
    assert any(p.endswith("packed modules derived again; --all does") for p in proof.unproven)
    assert run(pair, share=0.2)[0] == proof


def test_a_tampered_source(pair):
    path = pair[0] / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    _, findings = run(pair)
    assert "source-differs" in codes(findings)


def test_a_tampered_output(pair):
    path = pair[1] / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert {"output-differs", "not-derived"} <= codes(run(pair)[1])


def test_a_tampered_output_with_a_forged_hash(pair):
    arrays = read_arrays(pair[1])
    arrays[f"{Q}.weight_packed"][0, 0] ^= 1
    save_file(arrays, pair[1] / "model.safetensors", {"format": "pt"})
    rehash(pair[1])
    findings = run(pair)[1]
    assert codes(findings) == {"not-derived"}
    assert findings[0].where == Q


def test_a_changed_copy_with_a_forged_hash(pair):
    name = "model.language_model.norm.weight"
    arrays = read_arrays(pair[1])
    arrays[name] = (arrays[name].astype(np.float32) + 1).astype(arrays[name].dtype)
    save_file(arrays, pair[1] / "model.safetensors", {"format": "pt"})
    rehash(pair[1])
    findings = run(pair)[1]
    assert [(f.code, f.where) for f in findings] == [("not-derived", name)]


def test_a_changed_config_with_a_forged_hash(pair):
    path = pair[1] / "config.json"
    path.write_text(path.read_text().replace('"dtype": "bfloat16"', '"dtype": "float16"', 1))
    rehash(pair[1])
    assert codes(run(pair)[1]) == {"config-differs"}


def test_a_manifest_of_other_options(pair):
    edit_manifest(pair[1], lambda m: m["options"].update(scale_dtype="float16"))
    assert {"plan", "not-derived"} <= codes(run(pair)[1])


def test_another_source(pair):
    other = pair[0].parent / "other"
    tiny.write(other, tiny.tensors(9))
    findings = run((other, pair[1]))[1]
    assert {"source-differs", "not-derived"} <= codes(findings)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.pop("files"),
        lambda m: m.pop("source"),
        lambda m: m.update(files=[1, None]),
        lambda m: m.update(options=[]),
        lambda m: m.pop("copied"),
        lambda m: m["options"].update(scale_dtype=["bfloat16"]),
        lambda m: m.update(format="qatpack.repack/99"),
        lambda m: m["files"].append({"name": "../source/config.json", "bytes": 1, "sha256": "0"}),
    ],
)
def test_a_garbage_manifest_gives_findings(pair, change):
    edit_manifest(pair[1], change)
    assert "manifest" in codes(run(pair)[1])


@pytest.mark.parametrize("text", ["", "[1]", '{"a": 1, "a": 2}'])
def test_an_unreadable_manifest(pair, text):
    (pair[1] / "repack_report.json").write_text(text)
    proof, findings = run(pair)
    assert codes(findings) == {"manifest"}
    assert proof.proven == ()


def test_no_manifest(pair):
    (pair[1] / "repack_report.json").unlink()
    assert codes(run(pair)[1]) == {"manifest"}


def test_files_that_nobody_vouches_for(pair):
    shutil.copy(pair[1] / "model.safetensors", pair[1] / "extra.safetensors")
    (pair[1] / "notes.log").write_text("x")
    (pair[1] / "verify_report.json").write_text("{}")
    proof, findings = run(pair)
    assert "output-unlisted" in codes(findings)
    assert proof.unproven == ("files that the manifest does not list: notes.log",)


def test_an_edited_card_and_a_missing_file(pair):
    (pair[1] / "README.md").write_text("mine")
    (pair[1] / "LICENSE").unlink()
    proof, findings = run(pair)
    assert codes(findings) == {"output-missing", "sidecar-differs"}
    assert "README.md was changed after the repack" in proof.unproven


def test_unhashed_files_are_not_called_proven(tmp_path):
    tiny.write(tmp_path / "source")
    repack(resolve_source(tmp_path / "source"), tmp_path / "build", Options(hash_files=False))
    proof, findings = run((tmp_path / "source", tmp_path / "build"))
    assert findings == []
    assert sum("no sha256 is recorded for model.safetensors" in u for u in proof.unproven) == 2


def forged(pair, change):
    """The manifest edited, with the hashes of all output files as they are now."""
    path = pair[1] / "repack_report.json"
    manifest = json.loads(path.read_text())
    for record in manifest["files"]:
        file = pair[1] / record["name"]
        record |= {"bytes": file.stat().st_size, "sha256": hash_file(file)}
    change(manifest)
    path.write_text(json.dumps(manifest))


def test_sidecars_that_are_not_the_sources_though_their_hashes_fit(pair):
    (pair[1] / "tokenizer_config.json").write_text('{"bos_token": "<other>"}')
    forged(pair, lambda m: None)
    assert codes(run(pair)[1]) == {"sidecar-differs"}


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda m: m["source"]["files"].extend(m["source"]["files"][:1]), "twice"),
        (lambda m: m["files"].extend(m["files"] * 3), "twice"),
        (lambda m: m["source"]["files"].pop(0), "lists no hash of the source's model.safetensors"),
        (lambda m: m.update(packed=[]), "packed"),
        (lambda m: m["dropped"].update(x=["a"]), "dropped"),
        (lambda m: m["totals"].update(output_bytes=1), "totals.output_bytes"),
        (lambda m: m["totals"].pop("copied_tensors"), "totals.copied_tensors"),
        (lambda m: m.update(totals=3), "cannot be read"),
        (lambda m: m["files"].append({"name": "n" * 5000, "bytes": 1, "sha256": "x"}), "missing"),
    ],
)
def test_records_that_source_and_options_contradict(pair, change, word):
    forged(pair, change)
    _, findings = run(pair)
    assert any(word in str(finding) for finding in findings)


def test_a_name_on_the_hub_is_not_proven_by_bytes(pair):
    forged(pair, lambda m: m["source"].update(id="google/gemma-4-31B"))
    proof, findings = run(pair)
    assert not findings
    assert proof.unproven == ("that these source files are google/gemma-4-31B on the Hub",)
