import errno
import json
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file

from qatpack.checkpoint import writer as module
from qatpack.checkpoint.errors import CheckpointError
from qatpack.checkpoint.folder import Checkpoint
from qatpack.checkpoint.header import read_header
from qatpack.checkpoint.reader import NUMPY_DTYPES, TensorReader
from qatpack.checkpoint.writer import PAGE, ShardWriter, TensorSpec, plan_shards, shard_index

DTYPES = ("BF16", "F16", "F32", "I32", "I64", "U8", "F64")


def random_bytes(spec, seed=0):
    rng = np.random.default_rng(seed + len(spec.name))
    return rng.integers(0, 256, spec.nbytes, np.uint8)


def write_all(folder, layout, reader=None):
    with ShardWriter(folder, layout) as writer:
        for spec in layout.specs:
            if spec.source is not None:
                steps = []
                writer.copy(spec, reader.descriptor(spec.source.file), steps.append)
                assert sum(steps) == spec.nbytes
            else:
                data = random_bytes(spec)
                half = spec.nbytes // 2
                writer.write(spec.name, half, data[half:])
                writer.write(spec.name, 0, data[:half])
        return writer.commit()


specs = st.lists(
    st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 7), max_size=3)), max_size=12
).map(lambda items: [TensorSpec(f"t{i}", d, tuple(s)) for i, (d, s) in enumerate(items)])


@settings(max_examples=60, deadline=None)
@given(specs)
def test_any_layout_reads_back_aligned(tmp_path_factory, specs):
    folder = tmp_path_factory.mktemp("layout")
    (layout,) = plan_shards([specs], shard_bytes=1 << 40)
    path = write_all(folder, layout)
    header = read_header(path)
    assert header.metadata == {"format": "pt"}
    assert header.data_start % 8 == 0
    assert path.stat().st_size == layout.size
    for tensor in header.tensors:
        assert tensor.offset % NUMPY_DTYPES[tensor.dtype].itemsize == 0
    with safe_open(path, "np") as file:
        assert set(file.keys()) == {s.name for s in specs}
    with TensorReader() as reader:
        for spec in specs:
            tensor = next(t for t in header.tensors if t.name == spec.name)
            array = reader.read(tensor)
            assert array.shape == spec.shape
            assert array.tobytes() == random_bytes(spec).tobytes()


@settings(max_examples=60, deadline=None)
@given(specs, st.integers(1, 4000))
def test_shards_keep_order_units_and_size(specs, shard_bytes):
    layouts = plan_shards([[s] for s in specs], shard_bytes=shard_bytes)
    names = [s.name for s in specs]
    assert sorted(s.name for layout in layouts for s in layout.specs) == sorted(names)
    for layout in layouts:
        size = sum(s.nbytes for s in layout.specs)
        largest = max((s.nbytes for s in layout.specs), default=0)
        assert size <= shard_bytes or size == largest
    expected = [
        f"model-{i:05}-of-{len(layouts):05}.safetensors" for i in range(1, len(layouts) + 1)
    ]
    assert [x.file_name for x in layouts] == (
        expected if len(layouts) > 1 else ["model.safetensors"]
    )
    index = shard_index(layouts)
    assert index["metadata"]["total_size"] == sum(s.nbytes for s in specs)
    assert list(index["weight_map"]) == sorted(names)


def test_a_unit_is_never_torn():
    units = [[TensorSpec(f"{u}{i}", "U8", (10,)) for i in range(3)] for u in "ab"]
    layouts = plan_shards(units, shard_bytes=40)
    assert [sorted(s.name for s in x.specs) for x in layouts] == [
        ["a0", "a1", "a2"],
        ["b0", "b1", "b2"],
    ]


def test_largest_copy_is_in_step_with_its_pages(tmp_path):
    arrays = {
        "a": tiny.noise(np.random.default_rng(0), 4),
        "big": tiny.noise(np.random.default_rng(1), 64, 256),
    }
    source = Checkpoint.open(tiny.write(tmp_path / "c", arrays, cfg={}))
    (layout,) = plan_shards(
        [[TensorSpec.copy_of(t, t.name)] for t in source.tensors.values()], shard_bytes=1 << 40
    )
    at = dict(zip((s.name for s in layout.specs), layout.offsets, strict=True))
    assert source["big"].offset % 8 == 0
    assert (at["big"] - source["big"].offset) % PAGE == 0
    with TensorReader() as reader:
        path = write_all(tmp_path, layout, reader)
    for name, array in load_file(path).items():
        assert array.tobytes() == arrays[name].tobytes()


@pytest.mark.parametrize("failure", [errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, None])
def test_plain_copy_where_the_kernel_will_not(tmp_path, monkeypatch, failure):
    def refuse(*_):
        raise OSError(failure, os.strerror(failure))

    if failure is None:
        monkeypatch.delattr(os, "copy_file_range")
    else:
        monkeypatch.setattr(os, "copy_file_range", refuse)
    monkeypatch.setattr(module, "PLAIN_CHUNK", 1000)
    source = Checkpoint.open(tiny.write(tmp_path / "c"))
    (layout,) = plan_shards(
        [[TensorSpec.copy_of(t, t.name)] for t in source.tensors.values()], shard_bytes=1 << 40
    )
    with TensorReader() as reader:
        path = write_all(tmp_path, layout, reader)
    for name, array in load_file(path).items():
        assert array.tobytes() == tiny.tensors()[name].tobytes()


def test_source_that_shrinks_while_copied(tmp_path):
    source = Checkpoint.open(tiny.write(tmp_path / "c"))
    os.truncate(tmp_path / "c" / "model.safetensors", 3000)
    (layout,) = plan_shards(
        [[TensorSpec.copy_of(t, t.name)] for t in source.tensors.values()], shard_bytes=1 << 40
    )
    with TensorReader() as reader, pytest.raises(CheckpointError, match="cut while being read"):
        write_all(tmp_path, layout, reader)
    assert not list(tmp_path.glob("model*"))


def test_source_that_shrinks_while_read(tmp_path):
    source = Checkpoint.open(tiny.write(tmp_path / "c"))
    os.truncate(tmp_path / "c" / "model.safetensors", 3000)
    tensor = max(source.tensors.values(), key=lambda t: t.offset + t.nbytes)
    with TensorReader() as reader, pytest.raises(CheckpointError, match="cut while being read"):
        reader.read(tensor)


LAYOUT = plan_shards([[TensorSpec("a", "I32", (4,)), TensorSpec("b", "U8", (3,))]], shard_bytes=99)


def test_nothing_stands_under_the_final_name_before_commit(tmp_path):
    with ShardWriter(tmp_path, LAYOUT[0]) as writer:
        assert not writer.path.exists()
        writer.write("a", 0, np.arange(4, dtype="<i4"))
    assert list(tmp_path.iterdir()) == []


def test_commit_refuses_an_unfinished_tensor(tmp_path):
    with ShardWriter(tmp_path, LAYOUT[0]) as writer:
        writer.write("a", 0, np.arange(4, dtype="<i4"))
        with pytest.raises(ValueError, match="'b' is not written whole"):
            writer.commit()
    assert list(tmp_path.iterdir()) == []


def test_only_contiguous_little_endian_data_is_written(tmp_path):
    with ShardWriter(tmp_path, LAYOUT[0]) as writer:
        with pytest.raises(ValueError, match="contiguous"):
            writer.write("a", 0, np.arange(8, dtype="<i4")[::2])
        with pytest.raises(ValueError, match="little-endian"):
            writer.write("a", 0, np.arange(4, dtype=">i4"))
        with pytest.raises(ValueError, match="bytes 0 to 20 of 16"):
            writer.write("a", 0, np.arange(5, dtype="<i4"))


def test_full_disk_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space"), ShardWriter(tmp_path, LAYOUT[0]):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_write_error_found_while_flushing_fails_the_commit(tmp_path, monkeypatch):
    flushed = threading.Event()

    def fail(_):
        flushed.set()
        raise OSError(errno.EIO, "I/O error")

    monkeypatch.setattr(module, "FLUSH_BYTES", 1)
    monkeypatch.setattr(os, "fsync", fail)
    with ShardWriter(tmp_path, LAYOUT[0]) as writer:
        writer.write("a", 0, np.arange(4, dtype="<i4"))
        assert flushed.wait(10)
        monkeypatch.undo()
        writer.write("b", 0, np.arange(3, dtype="u1"))
        with pytest.raises(OSError, match="I/O error"):
            writer.commit()
    assert list(tmp_path.iterdir()) == []


def test_same_input_same_bytes(tmp_path):
    source = Checkpoint.open(tiny.write(tmp_path / "c"))
    units = [[TensorSpec.copy_of(t, t.name)] for t in source.tensors.values()]
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        with TensorReader() as reader:
            write_all(tmp_path / name, plan_shards(units, shard_bytes=1 << 40)[0], reader)
    assert (tmp_path / "x/model.safetensors").read_bytes() == (
        tmp_path / "y/model.safetensors"
    ).read_bytes()


COPY_SCRIPT = """
import sys
from pathlib import Path
from qatpack.checkpoint.folder import Checkpoint
from qatpack.checkpoint.reader import TensorReader
from qatpack.checkpoint.writer import ShardWriter, TensorSpec, plan_shards
source = Checkpoint.open(Path(sys.argv[1]))
units = [[TensorSpec.copy_of(t, t.name)] for t in source.tensors.values()]
with TensorReader() as reader:
    for layout in plan_shards(units, shard_bytes=1 << 40):
        with ShardWriter(Path(sys.argv[2]), layout) as writer:
            for spec in layout.specs:
                writer.copy(spec, reader.descriptor(spec.source.file), lambda _: None)
            writer.commit()
# VmHWM, not ru_maxrss: that one survives exec and would tell of pytest itself.
print([line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")][0])
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads /proc")
def test_copying_a_large_tensor_takes_little_memory(tmp_path):
    size = 300_000_000
    header = json.dumps(
        {"big": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
    ).encode()
    source = tmp_path / "c"
    source.mkdir()
    with open(source / "model.safetensors", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    done = subprocess.run(
        [sys.executable, "-c", COPY_SCRIPT, str(source), str(tmp_path)],
        check=True,
        capture_output=True,
        text=True,
    )
    assert int(done.stdout) * 1024 < size / 2
    assert (tmp_path / "model.safetensors").stat().st_size > size
