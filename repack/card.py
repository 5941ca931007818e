"""The model card: README.md written from the manifest and the source's own card."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..checkpoint.errors import CheckpointError
from ..checkpoint.header import regular_size
from ..checkpoint.units import share
from .sidecars import CARD_NAME, ORIGINAL_CARD_NAME

_KEPT = ("license", "license_name", "license_link", "pipeline_tag", "library_name", "language")
_TAGS = ("gemma", "qat", "w4a16", "int4", "compressed-tensors", "vllm", "qatpack")


def source_card(folder: Path) -> dict[str, Any]:
    """The YAML metadata of the source's README.md; {} where it has none.

    Raises `CheckpointError` when the block is there and cannot be read.
    """
    path = folder / CARD_NAME
    if not path.exists():
        return {}
    regular_size(path)
    # Imported here: it takes half a second, and only a finishing repack needs it.
    from huggingface_hub import metadata_load

    try:
        return dict(metadata_load(path) or {})
    except Exception as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{path}: its metadata block cannot be read: {reason}.") from error


def card_metadata(manifest: Mapping[str, Any], source: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata of our card: licence and task from the source's, the rest from the manifest.

    The licence is never guessed: `other` where the source states none.
    """
    metadata: dict[str, Any] = {key: source[key] for key in _KEPT if source.get(key)}
    metadata.setdefault("license", "other")
    metadata.setdefault("library_name", "transformers")
    if manifest["source"]["id"]:
        metadata["base_model"] = manifest["source"]["id"]
        metadata["base_model_relation"] = "quantized"
    metadata["tags"] = list(_TAGS)
    return metadata


def card(manifest: Mapping[str, Any], source_folder: Path) -> str:
    """The text of README.md for a repacked folder, all its figures from the manifest."""
    from huggingface_hub import ModelCardData

    source = source_card(source_folder)
    metadata = ModelCardData(**card_metadata(manifest, source)).to_yaml()
    name = manifest["source"]["id"] or "a QAT checkpoint"
    return f"---\n{metadata}\n---\n\n# {_title(name)}\n\n{_body(manifest, name, bool(source))}"


def _title(name: str) -> str:
    return f"{name.rpartition('/')[2]}, exact W4A16"


def _body(manifest: Mapping[str, Any], name: str, has_card: bool) -> str:
    totals, options = manifest["totals"], manifest["options"]
    commit = f" at commit `{manifest['source']['commit']}`" if manifest["source"]["commit"] else ""
    identical = share(totals["identical"], totals["values"])
    original = f" Its card is [`{ORIGINAL_CARD_NAME}`]({ORIGINAL_CARD_NAME})." if has_card else ""
    return f"""\
The trained 4-bit grid of {name}{commit}, recovered group by group and packed for
compressed-tensors (`pack-quantized`, W4A16, groups of 32). Nothing was quantized again: levels
and steps were recovered from the values and proven by decoding them back.{original}

| | |
|---|---|
| packed tensors | {totals["packed_tensors"]:,} ({totals["packed_modules"]:,} modules) |
| groups of 32 certified | {totals["certified"] + totals["zero"]:,} of {totals["groups"]:,} |
| stored scales | {options["scale_dtype"]} |
| values identical to the reference | {identical} (decode: `{manifest["decode"]}`) |
| copied unchanged | {totals["copied_tensors"]:,} tensors, {totals["copied_bytes"]:,} bytes |
| dropped | {totals["dropped_tensors"]:,} tensors, {totals["dropped_bytes"]:,} bytes |
| size | {totals["output_bytes"]:,} bytes of tensors (source: {totals["source_bytes"]:,}) |

Made with qatpack {manifest["tool"]["version"]}. `repack_report.json` holds the counts of every
tensor and the sha256 of every file.
"""
