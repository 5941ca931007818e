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
from qatpack.repack import finish, job, shards
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


def test_sidecars_travel_to_the_byte_and_the_card_is_ours(tmp_path):
    source = tiny.write(tmp_path / "c")
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


def test_a_ple_that_stays_dense_is_no_target(tmp_path):
    name = f"{tiny.TEXT}embed_tokens_per_layer.weight"
    folder = broken(tmp_path, 3.14e-3, where=(5, 40), name=name)
    run(folder, tmp_path / "out", Options(pack_ple=True, keep_off_grid=True))
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert list(config["config_groups"]) == ["group_0"]
    run(tiny.write(tmp_path / "good"), tmp_path / "packed", Options(pack_ple=True))
    config = json.loads((tmp_path / "packed/config.json").read_text())["quantization_config"]
    assert config["config_groups"]["group_1"]["targets"] == ["re:.*embed_tokens_per_layer$"]


def test_a_source_replaced_while_it_is_read_is_told(tmp_path, monkeypatch):
    folder = tiny.write(tmp_path / "c")
    other = tiny.write(tmp_path / "other", tiny.tensors(seed=5))
    real = shards.pack_tensors

    def swap(*arguments):
        os.replace(other / "model.safetensors", folder / "model.safetensors")
        return real(*arguments)

    monkeypatch.setattr(shards, "pack_tensors", swap)
    with pytest.raises(CheckpointError, match="changed while it was read"):
        run(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_and_inf_are_refused_whatever_the_choice(tmp_path, value, keep):
    folder = broken(tmp_path, value)
    with pytest.raises(GridError, match=r"k_proj\.weight row 5, group 1.*damaged"):
        run(folder, tmp_path / "out", Options(keep_off_grid=keep))


def test_nan_behind_an_off_grid_group_is_found_too(tmp_path):
    arrays = tiny.tensors()
    arrays[PART] = arrays[PART].copy()
    arrays[PART][1, 3] = float(arrays[PART][1, 3]) * 1.3 + 1e-3
    arrays[PART][9, 3] = np.nan
    with pytest.raises(GridError, match=r"row 9, group 0.*damaged"):
        run(tiny.write(tmp_path / "c", arrays), tmp_path / "out", Options(keep_off_grid=True))


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


@pytest.mark.parametrize("call", ["pwrite", "copy_file_range", "fsync", "posix_fallocate"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_failing_disk_is_one_sentence(tmp_path, source, monkeypatch, code, call):
    real, calls = getattr(os, call), []

    def fail(*arguments):
        """Fails from the third call on, when the run is well under way."""
        calls.append(1)
        if len(calls) > 2:
            raise OSError(code, os.strerror(code))
        return real(*arguments)

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OutputError, match=os.strerror(code)) as caught:
        run(source, tmp_path / "out", SMALL)
    assert "--resume" in str(caught.value)
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    run(source, tmp_path / "out", SMALL, resume=True)
    run(source, tmp_path / "whole", SMALL)
    assert folder_bytes(tmp_path / "out") == folder_bytes(tmp_path / "whole")


def test_a_bad_card_or_config_is_told_before_the_work(tmp_path, source):
    folder = tiny.write(tmp_path / "card")
    (folder / "README.md").write_text("---\na: [\n---\n")
    with pytest.raises(CheckpointError, match=r"README\.md: its metadata"):
        run(folder, tmp_path / "out")
    folder = tiny.write(tmp_path / "config", cfg=tiny.config(text_config=3))
    with pytest.raises(CheckpointError, match=r"config\.json: has no text_config"):
        run(folder, tmp_path / "out", Options(text_only=True))
    assert {p.name for p in tmp_path.iterdir()} == {"card", "config"}


def test_the_manifest_is_last(tmp_path, source, monkeypatch):
    real = finish.write_json

    def fail(path, value):
        if path.name == MANIFEST_NAME:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(path, value)

    monkeypatch.setattr(finish, "write_json", fail)
    with pytest.raises(OutputError):
        run(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert {p.name for p in (tmp_path / "out.partial").iterdir()} > {"config.json", "README.md"}


def test_only_a_few_shards_are_open_at_a_time(tmp_path, source, monkeypatch):
    open_now, most = set(), []
    real_enter, real_commit = shards.ShardWriter.__enter__, shards.ShardWriter.commit

    def enter(self):
        open_now.add(self.path)
        most.append(len(open_now))
        return real_enter(self)

    def commit(self):
        time.sleep(0.05)
        path = real_commit(self)
        open_now.discard(path)
        return path

    monkeypatch.setattr(shards.ShardWriter, "__enter__", enter)
    monkeypatch.setattr(shards.ShardWriter, "commit", commit)
    run(source, tmp_path / "out", Options(shard_bytes=10_000))
    assert len(most) > 2 * shards.IN_FLIGHT
    assert max(most) <= shards.IN_FLIGHT + 1


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
    real = shards.ShardWriter

    def spy(folder, layout):
        made.append(layout.file_name)
        return real(folder, layout)

    monkeypatch.setattr(shards, "ShardWriter", spy)
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
    files = sorted(stopped.glob("*.safetensors"))
    data = bytearray(files[0].read_bytes())
    data[-1] ^= 1
    files[0].write_bytes(data)
    files[1].unlink()
    made = written_shards(monkeypatch)
    run(source, tmp_path / "out", SMALL, resume=True)
    assert made == [files[0].name, files[1].name]
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
    with pytest.raises(OutputError, match="cannot be read as a journal"):
        run(source, tmp_path / "out", SMALL, resume=True)
    (stopped / JOURNAL_NAME).write_text('{"fingerprint": "x"}')
    with pytest.raises(OutputError, match="cannot be read as a journal"):
        run(source, tmp_path / "out", SMALL, resume=True)


def test_resume_touches_no_folder_that_is_not_ours(tmp_path, source):
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "thesis.txt").write_text("years of work")
    with pytest.raises(OutputError, match="not left by a repack"):
        run(source, tmp_path / "out", resume=True)
    assert (tmp_path / "out.partial" / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize("link", [False, True])
def test_a_source_named_like_the_working_folder_is_safe(tmp_path, link):
    folder = tiny.write(tmp_path / ("real" if link else "model.partial"))
    if link:
        (tmp_path / "model.partial").symlink_to(folder)
    before = folder_bytes(folder)
    for resume in (False, True):
        with pytest.raises(OutputError, match=r"source|no folder"):
            run(folder, tmp_path / "model", resume=resume)
    assert folder_bytes(folder) == before


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


BLOCKED = """
import sys
from pathlib import Path
from qatpack.checkpoint.source import resolve_source
from qatpack.repack import job, journal, stream
from qatpack.repack.plan import Options

wanted, recorded = int(sys.argv[3]), 0
write_json, pack = journal.write_json, stream.pack_module

def count(path, value):
    global recorded
    write_json(path, value)
    recorded = len(value["shards"])

def stop(module, reader, writer, *rest):
    counts = pack(module, reader, writer, *rest)
    if recorded >= wanted:
        print("now", flush=True)
        sys.stdin.read()
    return counts

journal.write_json, stream.pack_module = count, stop
job.repack(resolve_source(sys.argv[1]), Path(sys.argv[2]), Options(shard_bytes=40_000))
"""


@pytest.mark.parametrize("recorded", [0, 1])
def test_killed_in_the_middle_of_a_shard_and_resumed(tmp_path, source, monkeypatch, recorded):
    with subprocess.Popen(
        [sys.executable, "-c", BLOCKED, str(source), str(tmp_path / "out"), str(recorded)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout.readline() == b"now\n"
        process.send_signal(signal.SIGKILL)
    partial = tmp_path / "out.partial"
    assert not (tmp_path / "out").exists()
    assert list(partial.glob("*.tmp"))
    finished = json.loads((partial / JOURNAL_NAME).read_text())["shards"]
    assert len(finished) >= recorded
    made = written_shards(monkeypatch)
    run(source, tmp_path / "out", SMALL, resume=True)
    assert not set(made) & set(finished)
    monkeypatch.undo()
    run(source, tmp_path / "whole", SMALL)
    assert folder_bytes(tmp_path / "out") == folder_bytes(tmp_path / "whole")


MEASURED = """
import sys, threading, time
from pathlib import Path
from qatpack.checkpoint.source import resolve_source
from qatpack.repack import job

peak, done = 0, threading.Event()

def watch():
    global peak
    while not done.wait(0.005):
        text = open("/proc/self/status").read()
        peak = max(peak, int(text.split("RssAnon:")[1].split()[0]))

thread = threading.Thread(target=watch)
thread.start()
job.repack(resolve_source(sys.argv[1]), Path(sys.argv[2]))
done.set()
thread.join()
print(peak * 1024)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads /proc")
def test_memory_does_not_grow_with_the_tensors(tmp_path):
    """One tensor to pack and one to copy, each as large as all memory that the job may own."""
    rng = np.random.default_rng(0)
    big = {
        f"{tiny.TEXT}embed_tokens.weight": np.tile(tiny.grid(rng, 512, 4096), (64, 1)),
        f"{tiny.TEXT}layers.0.mlp.up_proj.weight": np.tile(tiny.grid(rng, 512, 4096), (64, 1)),
    }
    folder = tiny.write(tmp_path / "c", tiny.tensors() | big)
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(folder), str(tmp_path / "out")],
        check=True,
        capture_output=True,
        text=True,
    )
    assert sum(a.nbytes for a in big.values()) > 500_000_000
    assert int(done.stdout) < 260_000_000
