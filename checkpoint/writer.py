"""Writes shards of any size in bounded memory.

A shard is laid out before the first byte is written, so tensors can be filled in any order, a
row block at a time, and pass-through tensors are copied by the kernel. The file grows under a
temporary name; `commit` fsyncs and renames it.
"""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .errors import CheckpointError
from .header import DTYPE_BITS, TensorInfo, tensor_bytes
from .output import sync_folder
from .progress import Progress

# Between files that share an alignment of pages, copy_file_range moves whole pages: five times
# the speed of the unaligned case.
PAGE = 4096
COPY_CHUNK = 1 << 27
PLAIN_CHUNK = 1 << 23
FLUSH_BYTES = 1 << 28


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor to be written; with `source`, one that is copied unchanged from there."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    source: TensorInfo | None = None

    @classmethod
    def copy_of(cls, tensor: TensorInfo, name: str) -> TensorSpec:
        """The pass-through of a source tensor under `name`."""
        return cls(name, tensor.dtype, tensor.shape, tensor)

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return tensor_bytes(self.dtype, self.shape)


@dataclass(frozen=True)
class ShardLayout:
    """One file, decided to the byte: `offsets` are absolute, in the order of `specs`.

    Invariants: tensors follow each other without holes, each starts at a multiple of its item
    size, the data starts at a multiple of 8, and the largest pass-through tensor stands at its
    source's offset modulo `PAGE` where a padding of the header can do that.
    """

    file_name: str
    header: bytes
    specs: tuple[TensorSpec, ...]
    offsets: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return len(self.header) + sum(s.nbytes for s in self.specs)


def plan_shards(
    units: Iterable[Sequence[TensorSpec]], *, shard_bytes: int
) -> tuple[ShardLayout, ...]:
    """Cut `units` into shards of at most `shard_bytes` tensor bytes, in the given order.

    The tensors of one unit stay together; a unit larger than `shard_bytes` gets a shard of its
    own. One shard is called `model.safetensors`, several `model-00001-of-0000N.safetensors`.
    """
    shards: list[list[TensorSpec]] = [[]]
    filled = 0
    for unit in units:
        size = sum(spec.nbytes for spec in unit)
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].extend(unit)
        filled += size
    if len(shards) == 1:
        return (_lay_out("model.safetensors", shards[0]),)
    count = len(shards)
    return tuple(
        _lay_out(f"model-{number:05}-of-{count:05}.safetensors", specs)
        for number, specs in enumerate(shards, 1)
    )


def _lay_out(file_name: str, specs: Sequence[TensorSpec]) -> ShardLayout:
    """Order the tensors so that each is aligned, then pad the header for the largest copy."""
    ordered = tuple(sorted(specs, key=_layout_key))
    starts, position = [], 0
    for spec in ordered:
        starts.append(position)
        position += spec.nbytes
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for spec, start in zip(ordered, starts, strict=True):
        entries[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [start, start + spec.nbytes],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    data_start = _data_start(8 + len(text), ordered, starts)
    header = (data_start - 8).to_bytes(8, "little") + text.ljust(data_start - 8)
    return ShardLayout(file_name, header, ordered, tuple(data_start + s for s in starts))


def _layout_key(spec: TensorSpec) -> tuple[bool, int, int, int]:
    """Sort key; the sort is stable, so the given order decides last.

    Copies of whole 8-byte words come first, the largest leading; then written tensors by falling
    item size; then what could break the alignment of those behind it.
    """
    loose = spec.nbytes % 8 != 0
    copied = spec.source is not None
    return loose, not copied, -DTYPE_BITS[spec.dtype], -spec.nbytes if copied else 0


def _data_start(minimum: int, specs: Sequence[TensorSpec], starts: Sequence[int]) -> int:
    """Smallest multiple of 8 from `minimum` on that puts the largest copy in step with PAGE."""
    data_start = -(-minimum // 8) * 8
    copies = [
        (spec.nbytes, spec.source.offset - start)
        for spec, start in zip(specs, starts, strict=True)
        if spec.source is not None
    ]
    if not copies:
        return data_start
    nbytes, wanted = max(copies)
    if nbytes < PAGE or (wanted - data_start) % 8:
        return data_start
    return data_start + (wanted - data_start) % PAGE


class ShardWriter:
    """Fills one shard under `<name>.tmp`; a context manager that removes it unless committed."""

    def __init__(self, folder: Path, layout: ShardLayout) -> None:
        self.layout = layout
        self.path = folder / layout.file_name
        self._temporary = folder / f"{layout.file_name}.tmp"
        self._offsets = {
            s.name: (o, s.nbytes) for s, o in zip(layout.specs, layout.offsets, strict=True)
        }
        self._missing = {name: nbytes for name, (_, nbytes) in self._offsets.items()}
        self._file = os.open(
            self._temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644
        )
        self._flusher = _Flusher(self._file)

    def __enter__(self) -> ShardWriter:
        try:
            _reserve(self._file, self.layout.size)
            _write_all(self._file, memoryview(self.layout.header), 0)
        except BaseException:
            self._discard()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._file >= 0:
            self._discard()

    def _discard(self) -> None:
        self._flusher.stop()
        os.close(self._file)
        self._file = -1
        self._temporary.unlink(missing_ok=True)

    def write(self, name: str, start: int, data: np.ndarray) -> None:
        """Write C-contiguous little-endian `data` at byte `start` of tensor `name`.

        Every byte of every tensor has to be written exactly once before `commit`.
        """
        if not data.flags.c_contiguous or data.dtype.byteorder == ">":
            raise ValueError(f"{name}: data must be C-contiguous and little-endian")
        offset, nbytes = self._offsets[name]
        if start < 0 or start + data.nbytes > nbytes:
            raise ValueError(f"{name}: bytes {start} to {start + data.nbytes} of {nbytes}")
        _write_all(self._file, data.reshape(-1).view(np.uint8).data, offset + start)
        self._missing[name] -= data.nbytes
        self._flusher.add(data.nbytes)

    def copy(self, spec: TensorSpec, source: int, progress: Progress) -> None:
        """Copy a pass-through tensor from the open file `source`; `progress` gets the bytes."""
        if spec.source is None:
            raise ValueError(f"{spec.name} has no source to copy from")
        position = self._offsets[spec.name][0]
        try:
            for moved in copy_range(source, spec.source.offset, self._file, position, spec.nbytes):
                self._flusher.add(moved)
                progress(moved)
        except EOFError as error:
            raise CheckpointError(
                f"{spec.source.file}: {error}; it was cut while being read, restore it and run "
                "again."
            ) from error
        self._missing[spec.name] -= spec.nbytes

    def commit(self) -> Path:
        """Fsync, rename to the final name and return it. ValueError if any byte is missing."""
        unfinished = [name for name, left in self._missing.items() if left]
        if unfinished:
            raise ValueError(f"{self.path}: {unfinished[0]!r} is not written whole")
        self._flusher.stop()
        if self._flusher.error is not None:
            raise self._flusher.error
        os.fsync(self._file)
        os.close(self._file)
        self._file = -1
        os.replace(self._temporary, self.path)
        sync_folder(self.path.parent)
        return self.path


class _Flusher:
    """Sends a file to the disk on a thread while it is being filled, so that fsync has little left.

    The kernel reports a failed write once, to whoever syncs first: `error` keeps it for `commit`.
    """

    def __init__(self, file: int) -> None:
        self.error: OSError | None = None
        self._file = file
        self._pending = 0
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="flush", daemon=True)
        self._thread.start()

    def add(self, nbytes: int) -> None:
        """Count bytes just written."""
        self._pending += nbytes
        if self._pending >= FLUSH_BYTES:
            self._pending = 0
            self._wake.set()

    def stop(self) -> None:
        """Let the thread end; the file may be closed afterwards."""
        self._stopping = True
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        while self._wake.wait() and not self._stopping:
            self._wake.clear()
            try:
                os.fsync(self._file)
            except OSError as error:
                self.error = error
                return


def _reserve(file: int, size: int) -> None:
    """Claim the space now, so that a full disk shows before the work, where the system can."""
    if not hasattr(os, "posix_fallocate"):
        os.ftruncate(file, size)
        return
    try:
        os.posix_fallocate(file, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
        os.ftruncate(file, size)


def _write_all(file: int, view: memoryview, position: int) -> None:
    while view.nbytes:
        count = os.pwrite(file, view, position)
        view, position = view[count:], position + count


def copy_range(source: int, start: int, target: int, position: int, count: int) -> Iterator[int]:
    """Copy `count` bytes between open files, in the kernel where it can; yields each step's bytes.

    Raises EOFError when the source ends early.
    """
    kernel = hasattr(os, "copy_file_range")
    while count:
        try:
            moved = (
                os.copy_file_range(source, target, min(count, COPY_CHUNK), start, position)
                if kernel
                else _copy_plain(source, start, target, position, count)
            )
        except OSError as error:
            # Across file systems, or onto one without the call: the plain copy does it.
            if not kernel or error.errno not in _NO_COPY_FILE_RANGE:
                raise
            kernel = False
            continue
        if moved == 0 and kernel:
            kernel = False  # some file systems answer 0 for "not here"; only a read tells the end
            continue
        if moved == 0:
            raise EOFError(f"ends at byte {start}, {count} bytes early")
        start, position, count = start + moved, position + moved, count - moved
        yield moved


_NO_COPY_FILE_RANGE = (
    errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF,
)  # fmt: skip


def _copy_plain(source: int, start: int, target: int, position: int, count: int) -> int:
    data = os.pread(source, min(count, PLAIN_CHUNK), start)
    _write_all(target, memoryview(data), position)
    return len(data)


def shard_index(layouts: Sequence[ShardLayout]) -> dict[str, object]:
    """The `model.safetensors.index.json` of these shards: names sorted, true `total_size`."""
    weight_map = {s.name: layout.file_name for layout in layouts for s in layout.specs}
    total = sum(s.nbytes for layout in layouts for s in layout.specs)
    return {
        "metadata": {"total_size": total},
        "weight_map": dict(sorted(weight_map.items())),
    }
