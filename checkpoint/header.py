"""The header of one safetensors file, read without trusting it.

Format: 8 bytes little-endian header length, a JSON object, then the tensors' bytes without holes
(https://github.com/huggingface/safetensors#format). `read_header` checks all of it against the
file's real size, so that a later read at a tensor's offset cannot miss.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import CheckpointError

# Bits per element of every dtype code that safetensors 0.8 writes.
DTYPE_BITS: Mapping[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
}  # fmt: skip

# safetensors refuses a longer header; a length above it is garbage, not a header.
MAX_HEADER = 100_000_000
MAX_RANK = 64


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor stands: `nbytes` bytes at absolute `offset` of `file`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int

    @property
    def columns(self) -> int:
        """Length of the last axis; 1 for a scalar."""
        return self.shape[-1] if self.shape else 1

    @property
    def rows(self) -> int:
        """Product of all other axes: the rows of the [rows, columns] view of the stored bytes."""
        return math.prod(self.shape[:-1])


@dataclass(frozen=True, slots=True)
class Header:
    """A checked header: tensors in file order, and the file's `__metadata__` (None if absent)."""

    path: Path
    size: int
    data_start: int
    tensors: tuple[TensorInfo, ...]
    metadata: Mapping[str, Any] | None


def tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes that a tensor of this safetensors dtype and shape takes in a file."""
    return (math.prod(shape) * DTYPE_BITS[dtype] + 7) // 8


def read_header(path: Path) -> Header:
    """Read and check the header of one safetensors file.

    Raises `CheckpointError` in one sentence with the file and the bytes expected and found: a
    truncated file, trailing bytes, a header longer than the file or no JSON, duplicate names,
    offsets that overlap, leave holes or disagree with the shape, an LFS pointer.
    """
    try:
        size = regular_size(path)
        with open(path, "rb") as file:
            head = file.read(8)
            _refuse_pointer(path, head + file.read(32), size)
            file.seek(8)
            length = _header_length(path, head, size)
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}.") from error
    entries, metadata = _parse(path, raw)
    data_start = 8 + length
    tensors = sorted(
        (_tensor(path, name, entry, data_start) for name, entry in entries.items()),
        key=lambda t: (t.offset, t.nbytes),
    )
    _check_extent(path, tensors, data_start, size)
    return Header(path, size, data_start, tuple(tensors), metadata)


def regular_size(path: Path) -> int:
    """The size of a regular file. Raises `CheckpointError` for anything that could block a read."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path}: cannot be read: it is no regular file.")
    return status.st_size


def _refuse_pointer(path: Path, start: bytes, size: int) -> None:
    if start.startswith(b"version https://git-lfs"):
        raise CheckpointError(
            f"{path}: is a Git LFS pointer of {size} bytes, not the tensors; "
            "fetch the real file (git lfs pull, or hf download)."
        )


def _header_length(path: Path, head: bytes, size: int) -> int:
    if len(head) < 8:
        raise CheckpointError(
            f"{path}: holds {size} bytes, too few for a safetensors header; download it again."
        )
    length = int.from_bytes(head, "little")
    if length > MAX_HEADER:
        raise CheckpointError(
            f"{path}: announces a header of {length} bytes, more than the {MAX_HEADER} that the "
            "format allows; this is no safetensors file or its start is damaged."
        )
    if 8 + length > size:
        raise CheckpointError(
            f"{path}: announces a header of {length} bytes but the whole file has {size}; "
            "it is truncated or no safetensors file, download it again."
        )
    return length


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """`object_pairs_hook` that refuses a JSON object naming a key twice (ValueError)."""
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {twice!r} stands twice")
    return result


def _parse(path: Path, raw: bytes) -> tuple[dict[str, Any], Mapping[str, Any] | None]:
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: its header is not valid JSON: {error}.") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: its header is a JSON {type(header).__name__}, no object.")
    metadata = header.pop("__metadata__", None)
    # Files in the wild carry none, an empty one, or values that are no strings; nothing here
    # depends on it.
    return header, metadata if isinstance(metadata, dict) else None


def _is_sizes(value: Any) -> bool:
    if not isinstance(value, list) or len(value) > MAX_RANK:
        return False
    return all(type(n) is int and 0 <= n < 2**63 for n in value)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _tensor(path: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    where = f"{path}: tensor {_short(name)}"
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise CheckpointError(f"{where} lacks dtype, shape or data_offsets; the file is damaged.")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise CheckpointError(f"{where} has the unknown dtype {_short(dtype)}.")
    if not _is_sizes(shape) or not _is_sizes(offsets) or len(offsets) != 2:
        raise CheckpointError(
            f"{where} has a bad shape {_short(shape)} or data_offsets {_short(offsets)}."
        )
    begin, end = offsets
    expected = tensor_bytes(dtype, tuple(shape))
    if end - begin != expected:
        raise CheckpointError(
            f"{where} is {dtype} {shape}, {expected} bytes, but its data_offsets span "
            f"{end - begin}; the file is damaged."
        )
    return TensorInfo(name, dtype, tuple(shape), path, data_start + begin, expected)


def _check_extent(path: Path, tensors: list[TensorInfo], data_start: int, size: int) -> None:
    position = data_start
    for tensor in tensors:
        if tensor.offset != position:
            kind = "overlaps the one before" if tensor.offset < position else "leaves a hole"
            raise CheckpointError(
                f"{path}: tensor {_short(tensor.name)} starts at byte {tensor.offset}, expected "
                f"{position}: it {kind}; the file is damaged."
            )
        position += tensor.nbytes
    if size < position:
        raise CheckpointError(
            f"{path}: truncated: its header describes {position} bytes, the file has {size}; "
            "download it again."
        )
    if size > position:
        raise CheckpointError(
            f"{path}: {size - position} trailing bytes: its header describes {position} bytes, "
            f"the file has {size}; download it again."
        )
