"""What the manifest says of a build, checked field by field."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from ..checkpoint.errors import CheckpointError
from ..checkpoint.hub import COMMIT, HUB_ID, SHA256
from ..checkpoint.manifest import MANIFEST_FORMAT, MANIFEST_NAME, FileRecord
from .fields import FieldError, Fields

VERSION = re.compile(r"[\w.+-]+", re.ASCII)
SCALE_DTYPES = re.compile(r"bfloat16|float16|float32")

_TOTALS = (
    "source_bytes", "packed_tensors", "packed_modules", "copied_tensors", "copied_bytes",
    "dropped_tensors", "dropped_bytes", "output_tensors", "output_bytes", "groups", "certified",
    "zero", "values", "identical", "negative_zeros",
)  # fmt: skip


@dataclass(frozen=True)
class Build:
    """A repacked folder by its manifest.

    `totals`: the counts named in docs/repack.md. `files`: every file but the manifest and what
    is written later. `decode`: the rule behind `identical`.
    """

    version: str
    source_id: str | None
    commit: str | None
    source_files: tuple[FileRecord, ...]
    files: tuple[FileRecord, ...]
    scale_dtype: str
    text_only: bool
    pack_ple: bool
    keep_off_grid: bool
    shard_bytes: int
    decode: str
    totals: Mapping[str, int]

    @property
    def weights(self) -> dict[str, FileRecord]:
        """The safetensors files by name."""
        return {record.name: record for record in self.files if is_weights(record.name)}


def is_weights(name: str) -> bool:
    """Whether a file holds tensors."""
    return name.endswith(".safetensors")


def read_build(manifest: Mapping[str, Any]) -> Build:
    """The build that a manifest describes.

    Raises `CheckpointError` naming the field that is missing or of the wrong kind, also for a file
    that lies outside the folder or is listed twice.
    """
    try:
        return _build(Fields(manifest))
    except FieldError as error:
        raise CheckpointError(f"{MANIFEST_NAME}: {error}; repack the source again.") from error


def _build(fields: Fields) -> Build:
    if fields.text("format") != MANIFEST_FORMAT:
        raise FieldError(f"format is not {MANIFEST_FORMAT}")
    source, options = fields["source"], fields["options"]
    return Build(
        version=fields["tool"].text("version", VERSION),
        source_id=source.text_or_none("id", HUB_ID),
        commit=source.text_or_none("commit", COMMIT),
        source_files=_records(source["files"]),
        files=_records(fields["files"]),
        scale_dtype=options.text("scale_dtype", SCALE_DTYPES),
        text_only=options.flag("text_only"),
        pack_ple=options.flag("pack_ple"),
        keep_off_grid=options.text("on_off_grid") == "keep",
        shard_bytes=options.integer("shard_bytes"),
        decode=fields.text("decode"),
        totals=_totals(fields["totals"]),
    )


def _totals(fields: Fields) -> dict[str, int]:
    totals = {name: fields.integer(name) for name in _TOTALS}
    fields.part("identical", totals["values"])
    fields.part("certified", totals["groups"] - fields.part("zero", totals["groups"]))
    return totals


def _records(fields: Fields) -> tuple[FileRecord, ...]:
    records = tuple(
        FileRecord(_inside(item), item.integer("bytes"), item.text_or_none("sha256", SHA256))
        for item in fields.items()
    )
    names = [record.name for record in records]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise FieldError(f"{fields.path} lists {twice!r} twice")
    return records


def _inside(item: Fields) -> str:
    """A name of a file inside the folder: relative, no step upwards, nothing hidden."""
    name = item.text("name")
    path = PurePosixPath(name)
    odd = any(part.startswith(".") or not part.isprintable() for part in name.split("/"))
    if not name or path.is_absolute() or odd or path.as_posix() != name or "\\" in name:
        raise FieldError(
            f"{item.path} names {name!r}, which is no file inside the folder, or a hidden one"
        )
    return name
