"""`qatpack verify` as users run it: verdicts, exit codes, outputs, refusals."""

import json
import shutil

import numpy as np
import pytest
import tiny
from click.testing import CliRunner
from safetensors.numpy import save_file
from verify_builds import read_arrays

from qatpack.card.files import VERIFY_NAME
from qatpack.checkpoint.hashing import hash_file
from qatpack.checkpoint.source import resolve_source
from qatpack.cli import main
from qatpack.repack.job import repack
from qatpack.repack.plan import Options
from qatpack.verify import conform

Q = "model.language_model.layers.1.self_attn.q_proj"


@pytest.fixture(autouse=True)
def _no_torch(monkeypatch):
    """The checks of compressed-tensors have their own tests; here they would only take time."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setattr(conform, "conform", lambda *_, **__: ([], []))


def invoke(*arguments, code=0):
    result = CliRunner().invoke(main, ["verify", *map(str, arguments)])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    if "--json" not in arguments and "--markdown" not in arguments:
        assert all(len(line) <= 100 for line in result.stdout.splitlines())
    return result


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return tiny.write(tmp_path_factory.mktemp("source") / "c")


@pytest.fixture(scope="module")
def folders(tmp_path_factory, source):
    """An exact build, and one with a flipped nibble and without a manifest."""
    root = tmp_path_factory.mktemp("folders")
    repack(resolve_source(source), root / "exact", Options(scale_dtype="float32"))
    shutil.copytree(root / "exact", root / "flipped")
    arrays = read_arrays(root / "flipped")
    arrays[f"{Q}.weight_packed"][0, 0] ^= 1
    save_file(arrays, root / "flipped" / "model.safetensors")
    (root / "flipped" / "repack_report.json").unlink()
    return root


def test_an_exact_build(folders, source):
    result = invoke(folders / "exact", "--reference", source)
    assert "exact: exact: every group certified, 100 % identical." in result.stdout
    assert "values identical" in result.stdout
    assert "warning: exact/tokenizer.json: missing" in result.stdout.replace("\n  ", " ")


def test_a_damaged_build_fails(folders, source):
    result = invoke(folders / "flipped", "--reference", source, code=1)
    assert f"(first in {Q}, row 0, group 0)" in result.stdout.replace("\n  ", " ")


def test_builds_side_by_side(folders, source):
    both = [folders / "exact", folders / "flipped"]
    result = invoke(*both, "--reference", source, code=1)
    head = result.stdout.splitlines()[0].split()
    assert head == ["exact", "flipped"]
    assert "error, identical" in result.stdout
    many = invoke(*[folders / "exact"] * 5, "--reference", source)
    assert many.stdout.count("tied head stored") == 2


def test_long_names_are_cut_to_fit(folders, source, tmp_path):
    names = [tmp_path / f"gemma-4-E2B-it-qat-w4a16-ct-with-a-very-long-name-{i}" for i in range(3)]
    for name in names:
        shutil.copytree(folders / "exact", name)
    assert ".." in invoke(*names, "--reference", source).stdout.splitlines()[0]


def test_without_a_reference(folders):
    result = invoke(folders / "exact", code=1)
    assert "not compared: no reference given" in result.stdout
    assert "error: exact/tokenizer.json: missing" in result.stdout


SCHEMA = {
    "format", "tool", "build", "reference", "verdict", "passed", "complete", "sample_rows",
    "tensor_pattern", "stored", "fidelity", "copied", "checks", "findings", "provenance",
}  # fmt: skip


def test_json_is_stable(folders, source):
    report = json.loads(invoke(folders / "exact", "--reference", source, "--json").stdout)
    assert report.keys() == SCHEMA
    assert report["format"] == "qatpack.verify/1"
    assert report["verdict"] == {
        "kind": "exact",
        "text": "exact: every group certified, 100 % identical",
        "good": True,
    }
    assert report["passed"] is True
    digest = hash_file(folders / "exact" / "repack_report.json")
    assert report["build"] == {
        "name": "exact", "id": None, "commit": None, "manifest_sha256": digest,
    }  # fmt: skip
    total = report["fidelity"]["total"]
    assert total["identical_share"] == 1.0
    assert total["relative_error"] == 0.0
    assert sum(total["peak_levels"]) == total["groups"]
    assert {f["severity"] for f in report["findings"]} <= {"error", "warning", "note"}
    assert set(report["findings"][0]) == {"severity", "code", "where", "what", "do"}
    assert str(source) not in json.dumps(report)


def test_json_of_several_builds_is_a_list(folders, source):
    both = [folders / "exact", folders / "flipped"]
    reports = json.loads(invoke(*both, "--reference", source, "--json", code=1).stdout)
    assert [r["verdict"]["kind"] for r in reports] == ["exact", "damaged"]
    wrong = [t for t in reports[1]["fidelity"]["tensors"] if t["first_wrong"]]
    assert [(t["module"], t["first_wrong"]) for t in wrong] == [(Q, [0, 0])]


def test_markdown(folders, source):
    lines = invoke(folders / "exact", "--reference", source, "--markdown").stdout.splitlines()
    assert lines[0] == "|  | exact |"
    assert lines[1] == "| --- | ---: |"
    assert "| values identical | 100 % |" in lines


def test_write(folders, source, tmp_path):
    shutil.copytree(folders / "exact", tmp_path / "b")
    invoke(tmp_path / "b", "--reference", source, "--write")
    report = json.loads((tmp_path / "b" / VERIFY_NAME).read_text())
    assert report["verdict"]["kind"] == "exact"
    again = invoke(tmp_path / "b", "--reference", source, "--write", "--json")
    assert json.loads(again.stdout) == report


@pytest.mark.parametrize(
    ("threshold", "code"),
    [
        ("identical=1.0", 0), ("identical=0.5", 0), ("levels=1", 0), ("relative_error=0", 0),
        ("cast=0.999", 1), ("largest_error=0.1", 0),
    ],
)  # fmt: skip
def test_thresholds(folders, source, threshold, code):
    result = invoke(folders / "exact", "--reference", source, "--require", threshold, code=code)
    assert ("required is" in result.stdout) == bool(code)


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("BUILD", "--require", "identical=1"),
        ("BUILD", "--sample", "3"),
        ("BUILD", "--reference", "SOURCE", "--require", "nonsense=1"),
        ("BUILD", "--reference", "SOURCE", "--require", "identical=yes"),
        ("BUILD", "--reference", "SOURCE", "--require", "identical=2"),
        ("BUILD", "--reference", "SOURCE", "--json", "--markdown"),
        ("BUILD", "--reference", "SOURCE", "--all"),
        ("BUILD", "--reference", "SOURCE", "--share", "0.5"),
        ("BUILD", "--reference", "SOURCE", "--sample", "0"),
    ],
)
def test_wrong_usage_exits_with_2(folders, source, arguments):
    given = {"BUILD": folders / "exact", "SOURCE": source}
    assert invoke(*(given.get(a, a) for a in arguments), code=2).stdout == ""


def test_a_packed_reference_and_a_missing_build_are_refused(folders, source, tmp_path):
    result = invoke(folders / "exact", "--reference", folders / "exact", code=1)
    assert "already packed" in result.stderr
    assert "nothing-here" in invoke(tmp_path / "nothing-here", code=1).stderr
    missed = invoke(folders / "exact", "--reference", source, "--tensors", "x*", code=1)
    assert "no packed tensor matches 'x*'" in missed.stderr


def test_a_sample_and_a_pattern_are_said(folders, source):
    result = invoke(folders / "exact", "--reference", source, "--sample", 2)
    assert "2 rows of each packed tensor" in result.stdout
    chosen = invoke(folders / "exact", "--reference", source, "--tensors", "*.k_proj")
    assert "Only *.k_proj." in chosen.stdout


def test_rederive(folders, source):
    result = invoke(folders / "exact", "--reference", source, "--rederive", "--all")
    assert "26 of 26 packed modules derived again: bytes equal" in result.stdout
    assert "not proven" not in result.stdout
    some = invoke(folders / "exact", "--reference", source, "--rederive", "--share", 0.1)
    assert "not proven: exact: 23 of 26" in some.stdout
    bare = invoke(folders / "flipped", "--reference", source, "--rederive", code=1)
    assert "nothing can be derived again without it" in bare.stdout.replace("\n  ", " ")


def test_rederive_needs_a_source(folders):
    assert "names no source on the Hub" in invoke(folders / "exact", "--rederive", code=1).stderr


def test_vllm_and_matplotlib_absent(folders, source, tmp_path, monkeypatch):
    import importlib.util

    real = importlib.util.find_spec
    absent = ("vllm", "matplotlib")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n, *a: None if n in absent else real(n, *a)
    )
    result = invoke(folders / "exact", "--reference", source, "--load", "vllm", code=1)
    assert "vllm is not installed" in result.stdout
    plots = invoke(folders / "exact", "--reference", source, "--plots", tmp_path / "p", code=1)
    assert "pip install 'qatpack[plots]'" in plots.stderr


def test_plots(folders, source, tmp_path):
    pytest.importorskip("matplotlib")
    invoke(folders / "exact", "--reference", source, "--plots", tmp_path / "p")
    written = sorted(p.name for p in (tmp_path / "p").iterdir())
    assert written == ["exact-error.png", "exact-levels.png"]
    assert all(p.read_bytes()[:4] == b"\x89PNG" for p in (tmp_path / "p").iterdir())


def test_importing_verify_needs_no_torch():
    import subprocess
    import sys

    code = (
        "import sys, qatpack.cli.verify, qatpack.verify.job, qatpack.verify.load, "
        "qatpack.verify.conform, qatpack.verify.plots;"
        "found = {'torch', 'transformers', 'compressed_tensors', 'matplotlib'} & set(sys.modules);"
        "sys.exit(str(found) if found else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_help_ends_with_an_example():
    assert "Example:\n    qatpack verify " in invoke("--help").stdout


def test_a_tensor_of_no_values(folders, source, tmp_path):
    shutil.copytree(folders / "exact", tmp_path / "b")
    arrays = read_arrays(tmp_path / "b")
    arrays[f"{Q}.weight_packed"] = np.zeros((0, 8), np.int32)
    arrays[f"{Q}.weight_scale"] = np.zeros((0, 2), np.float32)
    save_file(arrays, tmp_path / "b" / "model.safetensors")
    assert "holds no values" in invoke(tmp_path / "b", "--reference", source, code=1).stdout
