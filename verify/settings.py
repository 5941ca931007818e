"""What stands beside the weights, held against the reference's: config.json and sidecar files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..checkpoint.errors import CheckpointError
from ..repack.config import output_config, without_quantization
from ..repack.layout import Layout
from ..repack.sidecars import CARD_NAME, sidecar_names
from .build import Build
from .findings import Finding, error, listed, warning
from .pairs import reference_name

# Rewritten by every tool that saves a config; they say nothing about the model.
_FREE = ("transformers_version", "_name_or_path")


def settings_findings(build: Build, reference: Layout) -> Iterator[Finding]:
    """Where the build's settings are not its reference's."""
    yield from _twice(build, reference)
    yield from _config_findings(build, reference)
    yield from _sidecar_findings(build, reference.checkpoint.folder)


def _twice(build: Build, reference: Layout) -> Iterator[Finding]:
    """Two names for one tensor: which of them counts is up to the reader."""
    names = Counter(reference_name(n, build, reference) for n in build.checkpoint.tensors)
    if twice := [name for name, count in names.items() if count > 1]:
        what = f"{len(twice)} tensors stand there under two names: {listed(twice)}"
        yield error("name-twice", build.name, what, "remove one of each")


def _config_findings(build: Build, reference: Layout) -> Iterator[Finding]:
    theirs = reference.checkpoint.config
    text_only = "text_config" in theirs and "text_config" not in build.checkpoint.config
    try:
        expected = without_quantization(output_config(theirs, (), text_only=text_only))
        ours = without_quantization(build.checkpoint.config)
    except (CheckpointError, RecursionError):
        what = "cannot be compared with the reference's"
        yield warning("config-differs", f"{build.name}/config.json", what)
        return
    changed, absent, added = _differences(ours, expected)
    where = f"{build.name}/config.json"
    if changed:
        what = f"{len(changed)} values are not the reference's: {listed(changed)}"
        yield error("config-differs", where, what, "copy config.json from the source")
    if absent or added:
        what = f"keys that one side lacks: {listed([*absent, *added])}"
        yield warning("config-keys", where, what, "check that they change nothing")


def _differences(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], path: str = ""
) -> tuple[list[str], list[str], list[str]]:
    """Dotted keys with other values, missing in ours, and only in ours."""
    changed: list[str] = []
    absent = [f"{path}{k}" for k in theirs.keys() - ours.keys() if k not in _FREE]
    added = [f"{path}{k}" for k in ours.keys() - theirs.keys() if k not in _FREE]
    for key in ours.keys() & theirs.keys():
        a, b, name = ours[key], theirs[key], f"{path}{key}"
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found = _differences(a, b, f"{name}.")
            for whole, part in zip((changed, absent, added), found, strict=True):
                whole += part
        elif key not in _FREE and (a != b or type(a) is not type(b)):
            changed.append(name)
    return changed, absent, added


def _sidecar_findings(build: Build, reference: Path) -> Iterator[Finding]:
    """Files that both sides have: other bytes are told, JSON that is none is an error."""
    for name in sidecar_names(reference):
        path = build.folder / name
        if name == CARD_NAME or not path.is_file():
            continue
        try:
            ours, theirs = path.read_bytes(), (reference / name).read_bytes()
        except OSError as fault:
            yield error("file-unread", f"{build.name}/{name}", f"cannot be read: {fault.strerror}")
            continue
        if ours == theirs:
            continue
        parsed = _parsed(ours) if name.endswith(".json") else None
        if name.endswith(".json") and parsed is None:
            yield error("file-damaged", f"{build.name}/{name}", "is no JSON", "copy it again")
        elif parsed is None or parsed != _parsed(theirs):
            what = "is not the reference's"
            yield warning("file-differs", f"{build.name}/{name}", what, "compare the two")


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None
