"""The files beside the weights: which of them travel, byte for byte."""

from __future__ import annotations

import os
import shutil
from fnmatch import fnmatch
from pathlib import Path

from ..checkpoint.folder import INDEX_NAME
from ..checkpoint.hashing import hash_file
from ..checkpoint.manifest import MANIFEST_NAME, FileRecord

# Tokenizer, processor, templates, generation settings, licence and notices. Only what readers and
# the law need travels: never logs, .env files or weights in another format.
_PATTERNS = ("*.json", "*.jinja", "*.model", "*.txt", "*.md", "licen[sc]e*", "notice*", "copying*")
_NOT_COPIED = (
    "config.json", INDEX_NAME, MANIFEST_NAME, "verify_report.json", "evaluation.json",
    "ORIGINAL_README.md", "*.safetensors.index.json", "*.bin.index.json",
)  # fmt: skip
_MULTIMODAL = ("*processor_config.json",)
CARD_NAME = "README.md"
ORIGINAL_CARD_NAME = "ORIGINAL_README.md"


def sidecar_names(folder: Path, *, text_only: bool = False) -> dict[str, str]:
    """Source name -> output name of the files to copy, sorted.

    The source's card becomes `ORIGINAL_README.md`; processor files stay behind in a text-only
    build. `additional_chat_templates/` is the one subfolder that readers know.
    """
    skipped = _NOT_COPIED + (_MULTIMODAL if text_only else ())
    names = [p.name for p in folder.iterdir() if p.is_file()]
    templates = folder / "additional_chat_templates"
    if templates.is_dir():
        names += [f"{templates.name}/{p.name}" for p in templates.iterdir() if p.is_file()]
    return {
        name: ORIGINAL_CARD_NAME if name == CARD_NAME else name
        for name in sorted(names)
        if not name.startswith(".")
        and any(fnmatch(name.lower(), pattern) for pattern in _PATTERNS)
        and not any(fnmatch(name, pattern) for pattern in skipped)
    }


def copy_sidecars(
    source: Path, target: Path, *, text_only: bool = False
) -> list[tuple[FileRecord, str]]:
    """Copy the sidecar files; (record of the source file, output name) for each."""
    copied = []
    for name, output in sidecar_names(source, text_only=text_only).items():
        path = target / output
        path.parent.mkdir(exist_ok=True)
        shutil.copyfile(source / name, path)
        with open(path, "rb+") as file:
            os.fsync(file.fileno())
        copied.append((FileRecord(name, path.stat().st_size, hash_file(path)), output))
    return copied
