"""A checkpoint folder: which tensors it holds, and where."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import CheckpointError
from .header import Header, TensorInfo, read_header, regular_size, unique_keys

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d+)-of-(?P<count>\d+)\.safetensors")


@dataclass(frozen=True)
class Checkpoint:
    """An opened folder.

    Invariants: every name stands in exactly one file; every tensor's bytes lie inside its file;
    with an index, the files it names hold exactly the tensors it maps to them.

    - `tensors`: name -> `TensorInfo`, in the order of the files and of the bytes in them.
    - `files`: the headers of the safetensors files in use, by name.
    - `config`: `config.json` as parsed, {} where there is none.
    - `warnings`: what looked odd but harms nothing: files that the index does not name, a wrong
      `total_size`.
    """

    folder: Path
    tensors: Mapping[str, TensorInfo]
    files: tuple[Header, ...]
    config: Mapping[str, Any]
    warnings: tuple[str, ...]

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Read all headers of `folder`. Raises `CheckpointError` for every kind of damage."""
        folder = Path(folder)
        if not folder.is_dir():
            kind = (
                "is a file, not a folder; give the folder it stands in"
                if folder.exists()
                else ("does not exist")
            )
            raise CheckpointError(f"{folder}: {kind}.")
        present = sorted(p.name for p in folder.glob("*.safetensors"))
        if (folder / INDEX_NAME).exists():
            headers, warnings = _open_indexed(folder, present)
        else:
            headers, warnings = _open_plain(folder, present)
        return cls(folder, _merge(headers), headers, _read_config(folder), tuple(warnings))

    def __getitem__(self, name: str) -> TensorInfo:
        try:
            return self.tensors[name]
        except KeyError:
            raise CheckpointError(f"{self.folder}: has no tensor named {name!r}.") from None

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors, headers not counted."""
        return sum(t.nbytes for t in self.tensors.values())


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, refusing duplicate keys. Raises `CheckpointError`."""
    try:
        regular_size(path)
        value = json.loads(path.read_bytes(), object_pairs_hook=unique_keys)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a JSON {type(value).__name__}, expected an object.")
    return value


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    return read_json(path) if path.exists() else {}


def _open_indexed(folder: Path, present: Sequence[str]) -> tuple[tuple[Header, ...], list[str]]:
    index = read_json(folder / INDEX_NAME)
    weight_map = _weight_map(folder, index)
    names = sorted(set(weight_map.values()))
    for name in names:
        if name not in present:
            hint = (
                f"; {SINGLE_NAME} is there: if it is the whole checkpoint, the index is a "
                "left-over, delete it"
                if SINGLE_NAME in present
                else "; download it again"
            )
            raise CheckpointError(f"{folder / INDEX_NAME}: names {name}, which is missing{hint}.")
    headers = tuple(read_header(folder / name) for name in names)
    _check_map(folder, weight_map, headers)
    warnings = [
        f"{name}: not named by {INDEX_NAME}, left alone." for name in present if name not in names
    ]
    warnings += _check_total(index, headers)
    return headers, warnings


def _weight_map(folder: Path, index: Mapping[str, Any]) -> dict[str, str]:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{folder / INDEX_NAME}: has no weight_map.")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or file[:1] in ("", "."):
            raise CheckpointError(
                f"{folder / INDEX_NAME}: maps {name!r} to {file!r}, which is no plain file name."
            )
    return weight_map


def _check_map(folder: Path, weight_map: Mapping[str, str], headers: Sequence[Header]) -> None:
    held = {(t.name, h.path.name) for h in headers for t in h.tensors}
    mapped = set(weight_map.items())
    for name, file in sorted(mapped - held):
        raise CheckpointError(
            f"{folder / INDEX_NAME}: says {name!r} is in {file}, whose header has no such tensor; "
            "index and shards are not of one export."
        )
    for name, file in sorted(held - mapped):
        raise CheckpointError(
            f"{folder / file}: holds {name!r}, which {INDEX_NAME} does not place there; "
            "index and shards are not of one export."
        )


def _check_total(index: Mapping[str, Any], headers: Sequence[Header]) -> list[str]:
    metadata = index.get("metadata")
    stated = metadata.get("total_size") if isinstance(metadata, dict) else None
    actual = sum(t.nbytes for h in headers for t in h.tensors)
    if stated is None or stated == actual:
        return []
    return [f"{INDEX_NAME}: says total_size {str(stated)[:40]}, the tensors have {actual} bytes."]


def _open_plain(folder: Path, present: Sequence[str]) -> tuple[tuple[Header, ...], list[str]]:
    if not present:
        raise CheckpointError(f"{folder}: holds no .safetensors file.")
    warnings: list[str] = []
    used = present
    if SINGLE_NAME in present and len(present) > 1:
        used = [SINGLE_NAME]
        warnings = [
            f"{name}: {SINGLE_NAME} stands beside it and there is no index, left alone."
            for name in present
            if name != SINGLE_NAME
        ]
    _check_numbering(folder, used)
    return tuple(read_header(folder / name) for name in used), warnings


def _check_numbering(folder: Path, names: Sequence[str]) -> None:
    """Shards named -of-0000N without an index: all N have to be there."""
    for name in names:
        if not (match := _SHARD.fullmatch(name)):
            continue
        count, width = int(match["count"]), len(match["number"])
        for number in range(1, count + 1):
            wanted = f"{match['stem']}-{number:0{width}}-of-{match['count']}.safetensors"
            if wanted not in names:
                raise CheckpointError(
                    f"{folder}: shard {wanted} is missing ({name} says there are {count}); "
                    "download it again."
                )


def _merge(headers: Sequence[Header]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for header in headers:
        for tensor in header.tensors:
            if other := tensors.get(tensor.name):
                raise CheckpointError(
                    f"{header.path}: holds {tensor.name!r}, which {other.file.name} holds too; "
                    "keep the files of one export only."
                )
            tensors[tensor.name] = tensor
    return tensors
