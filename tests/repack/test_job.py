import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import tiny
from safetensors import safe_open

from qatpack.checkpoint.errors import CheckpointError, GridError, OutputError
from qatpack.checkpoint.folder import INDEX_NAME, Checkpoint
from qatpack.checkpoint.manifest import MANIFEST_NAME
from qatpack.checkpoint.reader import TensorReader
from qatpack.checkpoint.source import Source, resolve_source
from qatpack.repack import finish, job
from qatpack.repack.journal import JOURNAL_NAME
from qatpack.repack.packing import decode
from qatpack.repack.plan import Options

DTYPES = ("bfloat16", "float16", "float32")
SMALL = Options(shard_bytes=40_000)


def run(source, out, options=Options(), **more):  # noqa: B008
    return job.repack(resolve_source(source), out, options, **more)


def folder_bytes(folder):
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()
    }


def decoded(folder, name):
    """A packed module of a build, decoded by our own rule: bf16[out, in]."""
    opened = Checkpoint.open(folder)
    with TensorReader() as reader:
        packed, scale, shape = (
            reader.read(opened[f"{name}.weight_{part}"]) for part in ("packed", "scale", "shape")
        )
    value = decode(packed, scale)
    assert list(shape) == list(value.shape)
    return value


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return tiny.write(tmp_path_factory.mktemp("source") / "c")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shards", [None, 3])
def test_every_value_comes_back(tmp_path, dtype, shards):
    arrays = tiny.tensors()
    manifest = run(
        tiny.write(tmp_path / "c", arrays, shards=shards),
        tmp_path / "out",
        Options(scale_dtype=dtype),
    )
    identical = values = 0
    for entry in manifest["packed"]:
        reference = arrays[entry["name"]]
        value = decoded(tmp_path / "out", entry["name"].removesuffix(".weight"))
        same = value.view(np.uint16) == reference.view(np.uint16)
        assert int(same.sum()) == entry["identical"]
        identical, values = identical + int(same.sum()), values + same.size
        error = np.abs(value.astype(np.float32) - reference.astype(np.float32))
        assert np.all(error <= 0.012 * np.abs(reference.astype(np.float32)))
    totals = manifest["totals"]
    assert (totals["identical"], totals["values"]) == (identical, values)
    assert totals["certified"] + totals["zero"] == totals["groups"] == values // 32
    assert identical / values > {"bfloat16": 0.85, "float16": 0.99, "float32": 0.999999}[dtype]


def test_copied_tensors_are_the_sources_bytes(tmp_path, source):
    manifest = run(source, tmp_path / "out", SMALL)
    arrays = tiny.tensors()
    opened = Checkpoint.open(tmp_path / "out")
    names = [n for group in manifest["copied"].values() for n in group]
    assert len(names) == manifest["totals"]["copied_tensors"]
    with TensorReader() as reader:
        for name in names:
            assert reader.read(opened[name]).tobytes() == arrays[name].tobytes()


def test_safetensors_reads_every_shard(tmp_path, source):
    run(source, tmp_path / "out", SMALL)
    index = json.loads((tmp_path / "out" / INDEX_NAME).read_text())
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    seen, total = {}, 0
    for path in files:
        with safe_open(path, "np") as file:
            assert file.metadata() == {"format": "pt"}
            for name in file.keys():  # noqa: SIM118 - not a dict
                seen[name] = path.name
                total += file.get_tensor(name).nbytes
    assert seen == index["weight_map"]
    assert total == index["metadata"]["total_size"]


def test_the_manifest_lists_every_file_with_its_hash(tmp_path, source):
    manifest = run(source, tmp_path / "out", SMALL)
    content = folder_bytes(tmp_path / "out")
    assert json.loads(content.pop(MANIFEST_NAME)) == json.loads(json.dumps(manifest))
    assert {f["name"]: (f["bytes"], f["sha256"]) for f in manifest["files"]} == {
        name: (len(data), hashlib.sha256(data).hexdigest()) for name, data in content.items()
    }
    origin = folder_bytes(source)
    assert {f["name"]: f["sha256"] for f in manifest["source"]["files"]} == {
        name: hashlib.sha256(data).hexdigest() for name, data in origin.items()
    }
    assert JOURNAL_NAME not in content
    assert not (tmp_path / "out.partial").exists()


def test_sidecars_travel_to_the_byte_and_the_card_is_ours(tmp_path, source):
    (source / ".env").write_text("HF_TOKEN=hf_x")
    (source / "train.log").write_text("log")
    run(source, tmp_path / "out")
    content = folder_bytes(tmp_path / "out")
    for name, data in tiny.SIDECARS.items():
        assert content["ORIGINAL_README.md" if name == "README.md" else name] == data
    assert ".env" not in content
    assert "train.log" not in content
    assert content["README.md"] != tiny.SIDECARS["README.md"]


def test_same_input_same_bytes(tmp_path, source):
    run(source, tmp_path / "a", SMALL)
    run(source, tmp_path / "b", SMALL)
    assert folder_bytes(tmp_path / "a") == folder_bytes(tmp_path / "b")


def test_text_only_leaves_the_processor_behind(tmp_path, source):
    run(source, tmp_path / "out", Options(text_only=True))
    content = folder_bytes(tmp_path / "out")
    assert "processor_config.json" not in content
    assert json.loads(content["config.json"])["architectures"] == ["Gemma4ForCausalLM"]
    assert all("language_model" not in n for n in Checkpoint.open(tmp_path / "out").tensors)


def test_without_hashes(tmp_path, source):
    manifest = run(source, tmp_path / "out", Options(hash_files=False, shard_bytes=40_000))
    hashes = {f["name"]: f["sha256"] for f in manifest["files"]}
    assert all((h is None) == n.endswith(".safetensors") for n, h in hashes.items())


def test_hashes_of_a_hub_snapshot_are_not_computed_again(tmp_path, source):
    known = Source(source, "google/x", "c" * 40, {"model.safetensors": "d" * 64})
    manifest = job.repack(known, tmp_path / "out")
    (weights,) = [f for f in manifest["source"]["files"] if f["name"] == "model.safetensors"]
    assert weights["sha256"] == "d" * 64
    assert weights["sha256_from"] == "hub"
    assert manifest["source"]["id"] == "google/x"
    assert manifest["source"]["commit"] == "c" * 40


def test_experts_are_unfused_and_exact(tmp_path):
    rng = np.random.default_rng(1)
    layer = f"{tiny.TEXT}layers.0."
    stacked = {
        f"{layer}experts.gate_up_proj": tiny.grid(rng, 3, 64, tiny.HIDDEN),
        f"{layer}experts.down_proj": tiny.grid(rng, 3, tiny.HIDDEN, 32),
        f"{layer}router.proj.weight": tiny.noise(rng, 3, tiny.HIDDEN),
    }
    run(
        tiny.write(tmp_path / "c", tiny.tensors() | stacked),
        tmp_path / "out",
        Options(scale_dtype="float32"),
    )
    gate_up, down, _ = stacked.values()
    for e in range(3):
        name = f"{layer}experts.{e}."
        for part, expected in {
            "gate_proj": gate_up[e, :32],
            "up_proj": gate_up[e, 32:],
            "down_proj": down[e],
        }.items():
            assert decoded(tmp_path / "out", name + part).tobytes() == expected.tobytes()


PART = f"{tiny.TEXT}layers.1.self_attn.k_proj.weight"


def broken(tmp_path, value, *, where=(5, 40), name=PART):
    arrays = tiny.tensors()
    arrays[name] = arrays[name].copy()
    arrays[name][where] = value
    return tiny.write(tmp_path / "c", arrays)


def off_grid_value():
    return float(tiny.tensors()[PART][5, 40]) * 1.3 + 1e-3


def test_off_grid_is_refused_with_its_place(tmp_path):
    folder = broken(tmp_path, off_grid_value())
    with pytest.raises(GridError) as caught:
        run(folder, tmp_path / "out")
    message = str(caught.value)
    assert f"{PART} row 5, group 1 (columns 32 to 63): " in message
    assert "--on-off-grid keep" in message
    assert not (tmp_path / "out").exists()


def test_off_grid_kept_takes_its_partners_and_nothing_else(tmp_path):
    folder = broken(tmp_path, off_grid_value())
    options = Options(keep_off_grid=True, scale_dtype="float32")
    manifest = run(folder, tmp_path / "out", options)
    attention = f"{tiny.TEXT}layers.1.self_attn."
    kept = {n for names in manifest["copied"].values() for n in names if n.startswith(attention)}
    assert {n.removeprefix(attention) for n in kept} == {
        "q_proj.weight", "k_proj.weight", "v_proj.weight", "k_norm.weight",
    }  # fmt: skip
    ignore = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]["ignore"]
    assert {f"{attention}{p}_proj" for p in "qkv"} <= set(ignore)
    (reason,) = [r for r, names in manifest["copied"].items() if PART in names]
    assert "row 5, group 1" in reason
    assert str(tmp_path) not in json.dumps(manifest)
    assert manifest["totals"]["identical"] == manifest["totals"]["values"]


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_and_inf_are_refused_whatever_the_choice(tmp_path, value, keep):
    folder = broken(tmp_path, value)
    with pytest.raises(GridError, match=r"k_proj\.weight row 5, group 1.*damaged"):
        run(folder, tmp_path / "out", Options(keep_off_grid=keep))


def test_a_group_that_needs_a_negative_step_is_never_clipped(tmp_path):
    arrays = tiny.tensors()
    arrays[PART] = (-arrays[PART].astype(np.float32)).astype(tiny.BF16)
    with pytest.raises(GridError, match="negative step"):
        run(tiny.write(tmp_path / "c", arrays), tmp_path / "out")


def test_zero_groups_and_negative_zeros_are_counted(tmp_path):
    arrays = tiny.tensors()
    arrays[PART] = arrays[PART].copy()
    arrays[PART][3] = 0
    levels = arrays[PART].astype(np.float32) == 0
    arrays[PART].view(np.uint16)[levels] = 0x8000
    manifest = run(
        tiny.write(tmp_path / "c", arrays), tmp_path / "out", Options(scale_dtype="float32")
    )
    (entry,) = [e for e in manifest["packed"] if e["name"] == PART]
    assert entry["zero"] == tiny.HIDDEN // 32
    assert entry["negative_zeros"] == int(levels.sum())
    assert entry["identical"] == entry["values"] - entry["negative_zeros"]
    assert np.array_equal(
        decoded(tmp_path / "out", PART.removesuffix(".weight")).astype(np.float32),
        arrays[PART].astype(np.float32),
    )
    opened = Checkpoint.open(tmp_path / "out")
    with TensorReader() as reader:
        scale = reader.read(opened[PART + "_scale"])
    assert (scale > 0).all()
    assert (scale[3] == 1).all()


def test_steps_beyond_float16_are_stored_and_counted(tmp_path):
    arrays = tiny.tensors()
    arrays[PART] = (arrays[PART].astype(np.float32) * 2.0**-24).astype(tiny.BF16)
    folder = tiny.write(tmp_path / "c", arrays)
    options = Options(scale_dtype="float16")
    (entry,) = [e for e in run(folder, tmp_path / "a", options)["packed"] if e["name"] == PART]
    assert entry["certified"] == entry["groups"]
    assert entry["identical"] < entry["values"]
    options = Options(scale_dtype="float32")
    (entry,) = [e for e in run(folder, tmp_path / "b", options)["packed"] if e["name"] == PART]
    assert entry["identical"] == entry["values"]


def test_no_config_no_repack(tmp_path):
    folder = tiny.write(tmp_path / "c")
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        run(folder, tmp_path / "out")


def test_ignore_list_and_dense_linears_are_compared_both_ways(tmp_path, source, monkeypatch):
    real = finish.output_config
    for change in (lambda x: x[:-2], lambda x: [*x, f"{tiny.TEXT}layers.0.mlp.up_proj"]):
        monkeypatch.setattr(
            finish, "output_config", lambda c, i, change=change, **k: real(c, change(list(i)), **k)
        )
        with pytest.raises(CheckpointError, match="ignore list"):
            run(source, tmp_path / "out", resume=True)


def test_out_that_exists_or_is_the_source(tmp_path, source):
    with pytest.raises(OutputError, match="source"):
        run(source, source)
    (tmp_path / "out").mkdir()
    run(source, tmp_path / "out")
    with pytest.raises(OutputError, match="not empty"):
        run(source, tmp_path / "out")


def test_no_space_is_told_before_anything_is_written(tmp_path, source, monkeypatch):
    monkeypatch.setattr(job, "free_space", lambda _: 1000)
    with pytest.raises(OutputError, match="needed"):
        run(source, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EDQUOT, errno.EIO])
def test_a_failing_disk_is_one_sentence(tmp_path, source, monkeypatch, code):
    def fail(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(OutputError, match=os.strerror(code)) as caught:
        run(source, tmp_path / "out")
    assert "--resume" in str(caught.value)
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    run(source, tmp_path / "out", resume=True)


def test_left_overs_need_resume(tmp_path, source):
    (tmp_path / "out.partial").mkdir()
    with pytest.raises(OutputError, match="--resume"):
        run(source, tmp_path / "out")


@pytest.fixture
def stopped(tmp_path, source, monkeypatch):
    """A run that failed after its shards were written: `out.partial` with a full journal."""

    def fail(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(job, "finish_folder", fail)
    with pytest.raises(KeyboardInterrupt):
        run(source, tmp_path / "out", SMALL)
    monkeypatch.undo()
    return tmp_path / "out.partial"


def written_shards(monkeypatch):
    made = []
    real = job.ShardWriter

    def spy(folder, layout):
        made.append(layout.file_name)
        return real(folder, layout)

    monkeypatch.setattr(job, "ShardWriter", spy)
    return made


def test_resume_reuses_what_is_finished(tmp_path, source, stopped, monkeypatch):
    (stopped / "model.safetensors.tmp").write_bytes(b"half")
    (stopped / "stale").mkdir()
    (stopped / "stale" / "x.json").write_text("{}")
    made = written_shards(monkeypatch)
    seen = []
    run(source, tmp_path / "out", SMALL, resume=True, progress=seen.append)
    assert made == []
    assert sum(seen) == sum(a.nbytes for a in tiny.tensors().values())
    run(source, tmp_path / "whole", SMALL)
    assert folder_bytes(tmp_path / "out") == folder_bytes(tmp_path / "whole")


def test_resume_does_not_trust_a_changed_shard(tmp_path, source, stopped, monkeypatch):
    shards = sorted(stopped.glob("*.safetensors"))
    data = bytearray(shards[0].read_bytes())
    data[-1] ^= 1
    shards[0].write_bytes(data)
    shards[1].unlink()
    made = written_shards(monkeypatch)
    run(source, tmp_path / "out", SMALL, resume=True)
    assert made == [shards[0].name, shards[1].name]
    monkeypatch.undo()
    run(source, tmp_path / "whole", SMALL)
    assert folder_bytes(tmp_path / "out") == folder_bytes(tmp_path / "whole")


def test_resume_refuses_other_options_and_another_source(tmp_path, source, stopped):
    with pytest.raises(OutputError, match="other options"):
        run(source, tmp_path / "out", Options(scale_dtype="float32"), resume=True)
    other = tiny.write(tmp_path / "other", tiny.tensors(seed=5))
    with pytest.raises(OutputError, match="another source"):
        run(other, tmp_path / "out", SMALL, resume=True)
    run(source, tmp_path / "out", SMALL, resume=True)


def test_resume_with_a_broken_journal(tmp_path, source, stopped):
    (stopped / JOURNAL_NAME).write_text('{"fingerprint"')
    with pytest.raises(CheckpointError, match="not valid JSON"):
        run(source, tmp_path / "out", SMALL, resume=True)


def test_two_runs_cannot_share_a_folder(tmp_path, source):
    code = (
        "import fcntl, os, sys; fd = os.open(sys.argv[1], os.O_RDONLY); "
        "fcntl.flock(fd, fcntl.LOCK_EX); print('held', flush=True); sys.stdin.read()"
    )
    (tmp_path / "out.partial").mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "out.partial")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        holder.stdout.readline()
        with pytest.raises(OutputError, match="another qatpack"):
            run(source, tmp_path / "out", resume=True)
        holder.stdin.close()
    run(source, tmp_path / "out", resume=True)


SLOW = """
import sys, time
from pathlib import Path
from qatpack.checkpoint.source import resolve_source
from qatpack.repack import job
from qatpack.repack.plan import Options
real = job.ShardWriter.commit
def slow(self):
    path = real(self)
    print(path.name, flush=True)
    time.sleep(0.3)
    return path
job.ShardWriter.commit = slow
job.repack(resolve_source(sys.argv[1]), Path(sys.argv[2]), Options(shard_bytes=40_000))
"""


@pytest.mark.parametrize("shards", [1, 3])
def test_killed_in_the_middle_and_resumed(tmp_path, source, shards):
    with subprocess.Popen(
        [sys.executable, "-c", SLOW, str(source), str(tmp_path / "out")], stdout=subprocess.PIPE
    ) as process:
        for _ in range(shards):
            process.stdout.readline()
        time.sleep(0.1)
        process.send_signal(signal.SIGKILL)
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "out.partial").exists()
    run(source, tmp_path / "out", SMALL, resume=True)
    run(source, tmp_path / "whole", SMALL)
    assert folder_bytes(tmp_path / "out") == folder_bytes(tmp_path / "whole")
