"""Each kind of build gets the right verdict, with compressed-tensors' own checks left out."""

import json
import shutil
import struct

import numpy as np
import pytest
import tiny
from safetensors.numpy import save_file
from verify_builds import DEMO, DTYPES, read_arrays

from qatpack.checkpoint.errors import CheckpointError
from qatpack.checkpoint.source import resolve_source
from qatpack.demo import rerounded
from qatpack.repack.job import repack
from qatpack.repack.packing import unpack
from qatpack.repack.plan import Options as RepackOptions
from qatpack.verify.findings import Severity
from qatpack.verify.job import Options, open_reference, verify
from qatpack.verify.verdict import Verdict

QUICK = Options(conformance=False)
LAYER = "model.language_model.layers.1."
Q = f"{LAYER}self_attn.q_proj"


def run(folder, reference, options=QUICK):
    return verify(resolve_source(folder), reference, options)


def codes(report, severity=Severity.ERROR):
    return {f.code for f in report.findings if f.severity is severity}


def test_float32_is_exact(builds, reference):
    report = run(builds["float32"], reference)
    assert report.judgement.text == "exact: every group certified, 100 % identical"
    assert report.passed
    assert report.total.values == 32 * report.total.groups == 1699840
    assert len(report.tensors) == 51
    assert len(report.copied.identical) == 267
    assert not codes(report) | codes(report, Severity.WARNING)


@pytest.mark.parametrize(("dtype", "share"), [("bfloat16", 0.91), ("float16", 0.998)])
def test_narrow_scales_are_the_trained_grid(builds, reference, dtype, share):
    report = run(builds[dtype], reference)
    assert report.judgement.verdict is Verdict.TRAINED
    assert f"the trained grid at {dtype} steps: levels all exact, 9" in report.judgement.text
    assert report.total.identical / report.total.values == pytest.approx(share, abs=0.01)
    assert report.total.on_level == report.total.groups
    assert report.passed


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_figures_are_those_of_the_manifest(builds, reference, dtype):
    totals = json.loads((builds[dtype] / "repack_report.json").read_text())["totals"]
    total = run(builds[dtype], reference).total
    assert (total.identical, total.groups) == (totals["identical"], totals["groups"])
    assert list(total.peak_levels[:9]) == totals["peaks"]


def test_the_published_fingerprint_of_a_rerounded_export(builds, reference):
    report = run(builds["rerounded"], reference)
    said = "re-rounded: steps are max/7.5 in 100 % of groups, relative error 6.6"
    assert report.judgement.text.startswith(said)
    assert report.total.max_7_5 == report.total.groups
    assert report.total.on_level == 0
    assert report.total.relative_error == pytest.approx(1 / 15, rel=5e-3)
    for _, tally in report.kinds().values():
        assert tally.relative_error == pytest.approx(1 / 15, rel=0.02)
    assert report.total.identical / report.total.values == pytest.approx(0.115, abs=0.01)
    assert str(report.head) == "yes, identical"
    assert codes(report, Severity.WARNING) == {"head-stored"}
    assert not report.passed


def test_a_duplicate_head_is_a_warning(edited, reference):
    def add(arrays):
        arrays["lm_head.weight"] = arrays["model.language_model.embed_tokens.weight"]

    report = run(edited("float32", add), reference)
    assert report.judgement.verdict is Verdict.EXACT
    assert codes(report, Severity.WARNING) == {"head-stored"}
    assert report.passed


def test_a_different_head_is_an_error(edited, reference):
    def add(arrays):
        head = arrays["model.language_model.embed_tokens.weight"].copy()
        head[0, 0] += 1
        arrays["lm_head.weight"] = head

    report = run(edited("float32", add), reference)
    assert "head-differs" in codes(report)
    assert not report.passed


def flip(arrays):
    arrays[f"{Q}.weight_packed"][3, 5] ^= 1 << 8


def test_one_flipped_nibble(edited, reference):
    report = run(edited("float32", flip, manifest=False), reference)
    group = 5 * 8 // 32
    assert report.judgement.text == (
        f"damaged: of 53,120 groups 1 hold other levels than the trained ones (first in {Q}, "
        f"row 3, group {group})"
    )
    assert report.total.identical == report.total.values - 1
    assert not report.passed


def test_one_flipped_nibble_contradicts_the_manifest(edited, reference):
    report = run(edited("float32", flip), reference)
    assert "claim-differs" in codes(report)
    assert report.judgement.verdict is Verdict.DAMAGED


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_wrong_scale(edited, reference, dtype):
    def change(arrays):
        arrays[f"{Q}.weight_scale"][7, 2] *= 2

    report = run(edited(dtype, change, manifest=False), reference)
    assert f"1 hold a wrong scale (first in {Q}, row 7, group 2)" in report.judgement.text
    assert (report.total.step_off, report.total.levels_differ) == (1, 0)


def scaled(change):
    def edit(arrays):
        for name in [n for n in arrays if n.endswith("weight_scale")]:
            arrays[name] = change(arrays[name])

    return edit


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_scales_just_off_the_trained_ones(edited, reference, dtype):
    """Within 1.5 ulps of bfloat16, but the dtype can hold the trained step."""
    change = scaled(lambda a: (a.astype(np.float32) * np.float32(1.003)).astype(a.dtype))
    report = run(edited(dtype, change, manifest=False), reference)
    assert report.judgement.verdict is Verdict.REROUNDED
    assert "re-rounded: levels are the trained ones, steps are not in" in report.judgement.text
    assert report.total.levels_differ == 0
    assert not report.passed


def test_bfloat16_scales_stored_as_float32(edited, reference):
    change = scaled(lambda a: a.astype(tiny.BF16).astype(np.float32))
    report = run(edited("float32", change, manifest=False), reference)
    assert report.judgement.text.startswith("the trained grid at 16-bit steps: levels all exact, 9")
    assert codes(report, Severity.WARNING) == {"scale-rounded"}
    assert 0 < report.total.rounded_steps < report.total.groups
    assert report.passed


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_scale_that_is_not_finite(edited, reference, value):
    def change(arrays):
        arrays[f"{Q}.weight_scale"][7, 2] = value

    report = run(edited("bfloat16", change), reference)
    assert report.judgement.verdict is Verdict.DAMAGED
    assert {"scale-not-finite", "claim-differs"} <= codes(report)
    json.dumps(report.to_json(), allow_nan=False)


def test_negative_steps_are_noted(edited, reference):
    def change(arrays):
        packed, scale = arrays[f"{Q}.weight_packed"], arrays[f"{Q}.weight_scale"]
        levels = unpack(packed).reshape(*scale.shape, 32)
        row, group = np.argwhere(levels.min(-1) > -8)[0]
        words = packed.reshape(*scale.shape, 4)[row, group]
        words[:] = (-levels[row, group] + 8).astype(np.uint32).reshape(4, 8) @ (
            16 ** np.arange(8, dtype=np.uint32)
        ).astype(np.uint32)
        scale[row, group] *= -1

    report = run(edited("float32", change, manifest=False), reference)
    assert report.total.negative_scales == 1
    assert report.judgement.verdict is Verdict.EXACT
    assert "scale-negative" in codes(report, Severity.NOTE)


def test_a_changed_norm(edited, reference):
    name = f"{LAYER}input_layernorm.weight"

    def change(arrays):
        arrays[name] = arrays[name] * 2

    report = run(edited("float32", change), reference)
    assert report.judgement.text == f"damaged: 1 of 267 copied tensors differ ({name})"
    assert report.copied.differ == (name,)
    assert "copied-differ" in codes(report)


def test_a_missing_norm(edited, reference):
    report = run(edited("float32", lambda a: a.pop(f"{LAYER}input_layernorm.weight")), reference)
    assert report.judgement.verdict is Verdict.DAMAGED
    assert "copied-missing" in codes(report)


def test_a_missing_scale(edited, reference):
    report = run(edited("float32", lambda a: a.pop(f"{Q}.weight_scale")), reference)
    assert report.judgement.verdict is Verdict.DAMAGED
    assert "packed-missing" in codes(report)
    assert "copied-missing" not in codes(report)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two tiny checkpoints of other weights, and a build of the first."""
    root = tmp_path_factory.mktemp("two")
    for seed in (1, 2):
        tiny.write(root / f"source{seed}", tiny.tensors(seed))
    repack(resolve_source(root / "source1"), root / "build", RepackOptions(scale_dtype="float32"))
    return root


def test_another_reference(two):
    other = open_reference(resolve_source(two / "source2"))
    report = run(two / "build", other)
    assert report.judgement.verdict is Verdict.FOREIGN
    assert report.judgement.text.startswith("not derived from this reference: ")
    assert not report.passed
    assert run(two / "build", open_reference(resolve_source(two / "source1"))).passed


def test_another_reference_with_the_same_norms(two, tmp_path):
    arrays = tiny.tensors(1)
    arrays |= {n: a for n, a in tiny.tensors(2).items() if "_proj" in n or "per_layer_" in n}
    arrays["model.language_model.embed_tokens_per_layer.weight"] = tiny.tensors(1)[
        "model.language_model.embed_tokens_per_layer.weight"
    ]
    other = tiny.write(tmp_path / "mixed", arrays)
    report = run(two / "build", open_reference(resolve_source(other)))
    assert report.judgement.verdict is Verdict.DAMAGED
    assert report.total.relative_error > 1


def test_a_base_model_is_on_no_grid(two, tmp_path):
    rng = np.random.default_rng(0)
    arrays = {
        n: tiny.noise(rng, *a.shape) if n.endswith("_proj.weight") and "tower" not in n else a
        for n, a in tiny.tensors(1).items()
    }
    base = tiny.write(tmp_path / "base", arrays)

    build = rerounded.export(base, tmp_path / "awq", head=False)
    edit = read_arrays(build)
    for name in edit:
        if name.endswith("weight_scale"):
            edit[name] = edit[name] * np.float32(0.97).astype(edit[name].dtype)
    save_file(edit, build / "model.safetensors")
    report = run(build, open_reference(resolve_source(base)))
    assert report.judgement.verdict is Verdict.REROUNDED
    assert "on no 4-bit grid" in report.judgement.text
    assert "off-grid" in codes(report)


def test_a_stale_index(edited, reference):
    folder = edited("float32")
    index = {"metadata": {}, "weight_map": {"x": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    report = run(folder, reference)
    assert report.judgement.text.startswith("damaged: ")
    assert "which is missing" in report.judgement.text
    assert codes(report) == {"files"}


def test_a_truncated_shard(edited, reference):
    folder = edited("float32")
    path = folder / "model.safetensors"
    with open(path, "rb+") as file:
        file.truncate(path.stat().st_size - 100)
    report = run(folder, reference)
    assert report.judgement.verdict is Verdict.DAMAGED
    assert "truncated" in report.judgement.text
    json.dumps(report.to_json(), allow_nan=False)


def test_the_reference_itself_is_not_packed(reference):
    report = run(DEMO, reference)
    assert report.judgement.verdict is Verdict.UNPACKED
    assert not report.passed


def test_a_packed_reference_is_refused(builds):
    with pytest.raises(CheckpointError, match="already packed"):
        open_reference(resolve_source(builds["float32"]))


def test_text_only_and_per_layer_embeddings(tmp_path, reference):
    options = RepackOptions(scale_dtype="float32", text_only=True, pack_ple=True)
    repack(resolve_source(DEMO), tmp_path / "text", options)
    report = run(tmp_path / "text", reference)
    assert report.judgement.verdict is Verdict.EXACT
    assert set(report.copied.dropped.values()) == {"vision or audio: not in a text-only build"}
    assert "embeddings" in {k.value for k in report.kinds()}
    assert "embedding-packed" in codes(report, Severity.NOTE)
    assert report.passed


def test_a_sample_and_a_pattern(builds, reference):
    sampled = run(builds["float32"], reference, Options(sample=2))
    assert sampled.total.values == sum(2 * t.shape[1] for t in sampled.tensors)
    assert sampled.judgement.text.endswith("in the part compared")
    chosen = run(builds["float32"], reference, Options(pattern="*.q_proj"))
    assert {t.kind.value for t in chosen.tensors} == {"q"}
    assert chosen.copied is None
    assert chosen.to_json()["complete"] is False


def test_a_group_on_a_negative_step_is_not_called_certified(tmp_path):
    name = "model.language_model.layers.0.self_attn.q_proj"
    arrays = tiny.tensors(1)
    weight = arrays[f"{name}.weight"].copy()
    weight[0, :32] = -weight[0, :32]
    source = tiny.write(tmp_path / "source", arrays)
    repack(resolve_source(source), tmp_path / "build", RepackOptions(scale_dtype="float32"))
    build = read_arrays(tmp_path / "build")
    build[f"{name}.weight_scale"][0, 0] *= -1
    save_file(build, tmp_path / "build" / "model.safetensors")
    (tmp_path / "build" / "repack_report.json").unlink()
    other = tiny.write(tmp_path / "other", arrays | {f"{name}.weight": weight})
    report = run(tmp_path / "build", open_reference(resolve_source(other)))
    assert report.judgement.text.startswith(
        "exact: 100 % identical, 1 groups of the reference on no positive 4-bit grid"
    )
    assert report.total.uncertified == 1


def test_a_pattern_that_matches_broken_modules_only(edited, reference):
    folder = edited("float32", lambda a: a.pop(f"{Q}.weight_scale"))
    report = run(folder, reference, Options(pattern=Q))
    assert report.judgement.verdict is Verdict.DAMAGED
    assert report.to_json()["fidelity"] is None


def test_a_sample_compares_the_ends_of_copied_tensors(builds, edited, reference):
    name = "model.language_model.embed_tokens.weight"

    def change(arrays):
        arrays[name][-1, -1] += 1

    assert run(edited("float32", change), reference, Options(sample=1)).copied.differ == (name,)


def test_a_report_does_not_tell_where_it_was_made(edited, reference):
    folder = edited("float32")
    with open(folder / "model.safetensors", "rb+") as file:
        file.truncate(1000)
    for report in (run(folder, reference), run(folder, None)):
        assert str(folder.parent) not in json.dumps(report.to_json())


def test_a_sample_finds_where(edited, reference):
    def change(arrays):
        arrays[f"{Q}.weight_scale"][-1, 1] *= 2

    report = run(edited("float32", change), reference, Options(sample=3))
    found = next(t for t in report.tensors if t.module == Q)
    assert found.first_wrong == (found.shape[0] - 1, 1)


@pytest.mark.parametrize("size", [16, 64, 160])
def test_other_group_sizes(tmp_path, size):
    """A build on groups of another size: decoded as its scales say, levels not compared."""
    source = tiny.write(tmp_path / "source", config_of(size))
    layout = open_reference(resolve_source(source))
    build = tmp_path / "build"
    repack(resolve_source(source), build, RepackOptions(scale_dtype="float32"))
    arrays = read_arrays(build)
    for name in [n for n in arrays if n.endswith("weight_scale")]:
        scale, columns = arrays[name], arrays[name].shape[1] * 32
        if columns % size == 0:
            wide = np.repeat(scale, 32, 1)
            arrays[name] = np.ascontiguousarray(wide.reshape(len(scale), -1, size)[..., 0])
    save_file(arrays, build / "model.safetensors")
    (build / "repack_report.json").unlink()
    report = run(build, layout)
    assert {t.group_size for t in report.tensors} >= {size}
    assert "group-size" in codes(report)
    wanted = {16: Verdict.EXACT, 64: Verdict.DAMAGED, 160: Verdict.REROUNDED}
    assert report.judgement.verdict is wanted[size]
    if size == 16:
        said = "exact: 100 % identical, in groups of 16 instead of the trained 32"
        assert report.judgement.text == f"{said}, but 1 error in the folder"


def config_of(size):
    arrays = tiny.tensors(3)
    if size == 160:
        rng = np.random.default_rng(0)
        arrays["model.language_model.layers.0.self_attn.o_proj.weight"] = tiny.grid(rng, 64, 160)
    return arrays


def test_experts_are_compared_with_their_stack(tmp_path):
    rng = np.random.default_rng(0)
    arrays = tiny.tensors(1)
    for layer in range(tiny.LAYERS):
        prefix = f"model.language_model.layers.{layer}.experts."
        arrays[f"{prefix}gate_up_proj"] = tiny.grid(rng, 3, 64, 64)
        arrays[f"{prefix}down_proj"] = tiny.grid(rng, 3, 64, 32)
    source = tiny.write(tmp_path / "moe", arrays)
    repack(resolve_source(source), tmp_path / "build", RepackOptions(scale_dtype="float32"))
    report = run(tmp_path / "build", open_reference(resolve_source(source)))
    assert report.judgement.verdict is Verdict.EXACT
    kinds = {k.value: n for k, (n, _) in report.kinds().items()}
    assert kinds["experts"] == 3 * 3 * tiny.LAYERS
    assert report.passed


def rewrite_header(path, change):
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


def as_float(header):
    header[f"{Q}.weight_packed"]["dtype"] = "F32"


def as_integer(header):
    header[f"{Q}.weight_scale"]["dtype"] = "I32"


def turned(header):
    header[f"{Q}.weight_packed"]["shape"] = header[f"{Q}.weight_packed"]["shape"][::-1]


def flat(header):
    shape = header[f"{Q}.weight_scale"]["shape"]
    header[f"{Q}.weight_scale"]["shape"] = [shape[0] * shape[1]]


@pytest.mark.parametrize("change", [as_float, as_integer, turned, flat])
def test_hostile_tensors_give_findings(builds, tmp_path, reference, change):
    shutil.copytree(builds["float32"], tmp_path / "b")
    rewrite_header(tmp_path / "b" / "model.safetensors", change)
    report = run(tmp_path / "b", reference)
    assert report.judgement.verdict is Verdict.DAMAGED
    assert {f.where for f in report.findings if f.code == "packed-shape"} == {Q}


@pytest.mark.parametrize("stated", [[2**62, 2**62], [-1, 32], [0, 0], [32, 128]])
def test_a_hostile_weight_shape(edited, reference, stated):
    def change(arrays):
        arrays[f"{Q}.weight_shape"] = np.array(stated, np.int64)

    report = run(edited("float32", change), reference)
    assert codes(report) == {"shape-wrong"}
    assert not report.passed


def test_an_enormous_weight_shape_tensor_is_not_read(edited, reference):
    def change(arrays):
        arrays[f"{Q}.weight_shape"] = np.zeros((1000, 1000), np.int64)

    assert codes(run(edited("float32", change), reference)) == {"shape-wrong"}


def test_a_missing_weight_shape(edited, reference):
    report = run(edited("float32", lambda a: a.pop(f"{Q}.weight_shape")), reference)
    assert codes(report) == {"shape-missing"}
    assert report.judgement.verdict is Verdict.EXACT
