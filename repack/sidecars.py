"""The files beside the weights: which of them travel, byte for byte."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from ..card.files import CARD_NAME, ORIGINAL_CARD_NAME
from ..checkpoint.hashing import hash_file
from ..checkpoint.manifest import FileRecord
from ..checkpoint.sidecars import TEMPLATES, is_sidecar


def sidecar_names(folder: Path, *, text_only: bool = False) -> dict[str, str]:
    """Source name -> output name of the files to copy, sorted.

    The source's card becomes `ORIGINAL_README.md`, its config.json is rewritten elsewhere, and
    processor files stay behind in a text-only build.
    """
    names = [p.relative_to(folder).as_posix() for p in _files(folder)]
    return {
        name: ORIGINAL_CARD_NAME if name == CARD_NAME else name
        for name in sorted(names)
        if is_sidecar(name)
        and name != "config.json"
        and not (text_only and name.endswith("processor_config.json"))
    }


def _files(folder: Path) -> list[Path]:
    inner = folder / TEMPLATES
    entries = [*folder.iterdir(), *(inner.iterdir() if inner.is_dir() else ())]
    return [path for path in entries if path.is_file()]


def copy_sidecars(source: Path, target: Path, *, text_only: bool = False) -> list[FileRecord]:
    """Copy the sidecar files; the record of each source file."""
    copied = []
    for name, output in sidecar_names(source, text_only=text_only).items():
        path = target / output
        path.parent.mkdir(exist_ok=True)
        shutil.copyfile(source / name, path)
        with open(path, "rb+") as file:
            os.fsync(file.fileno())
        copied.append(FileRecord(name, path.stat().st_size, hash_file(path)))
    return copied
