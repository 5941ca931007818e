"""The record a finished folder carries: which files, which hashes, made from what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import CheckpointError
from .folder import read_json

MANIFEST_NAME = "repack_report.json"
MANIFEST_FORMAT = "qatpack.repack/1"


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file by its name inside its folder. `sha256` is None where hashing was skipped.

    `from_hub`: the hash is the Hub's LFS record of the downloaded snapshot, not computed here.
    """

    name: str
    size: int
    sha256: str | None
    from_hub: bool = False

    def to_json(self) -> dict[str, Any]:
        """As it stands in the manifest."""
        record: dict[str, Any] = {"name": self.name, "bytes": self.size, "sha256": self.sha256}
        return {**record, "sha256_from": "hub"} if self.from_hub else record


def read_manifest(folder: Path) -> Mapping[str, Any]:
    """The manifest of a finished folder. Raises `CheckpointError` where there is none."""
    path = folder / MANIFEST_NAME
    if not path.exists():
        raise CheckpointError(
            f"{folder}: has no {MANIFEST_NAME}; it is unfinished or not made by qatpack."
        )
    return read_json(path)
