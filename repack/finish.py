"""What stands beside the shards: index, config, sidecars, card, and last the manifest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ..card.build import read_build
from ..card.files import CARD_NAME
from ..card.metadata import source_card
from ..card.page import PLACEHOLDER, card_text
from ..card.results import Results
from ..checkpoint.errors import CheckpointError
from ..checkpoint.folder import INDEX_NAME, Checkpoint
from ..checkpoint.hashing import hash_file
from ..checkpoint.manifest import MANIFEST_FORMAT, MANIFEST_NAME, FileRecord
from ..checkpoint.output import sync_folder, write_file, write_json
from ..checkpoint.source import Source
from ..checkpoint.writer import ShardLayout, shard_index
from .config import output_config
from .grid import Counts
from .journal import JOURNAL_NAME
from .layout import dense_linears, is_packed, read_layout
from .plan import Plan
from .sidecars import copy_sidecars


def finish_folder(
    source: Source,
    plan: Plan,
    working: Path,
    *,
    layouts: Sequence[ShardLayout],
    counts: Mapping[str, Counts],
    sources: Sequence[FileRecord],
    shards: Sequence[FileRecord],
) -> dict[str, Any]:
    """Complete a working folder whose shards are written; returns the manifest, written last.

    `counts`: by module. `sources`, `shards`: the weight files of both sides. Raises
    `CheckpointError` when the folder read back is not what was planned.
    """
    options = plan.options
    if len(layouts) > 1:
        write_json(working / INDEX_NAME, shard_index(layouts))
    copied = copy_sidecars(source.folder, working, text_only=options.text_only)
    write_json(working / "config.json", plan_config(plan))
    check_folder(plan, working)
    manifest = _manifest(source, plan, counts, [*sources, *_settings(source.folder), *copied])
    known = {record.name: record for record in shards}
    names = [name for name in _file_names(working) if name != CARD_NAME]
    records = [known.get(name) or _record(working, name) for name in names]
    manifest["files"] = [record.to_json() for record in records]
    card = _card(manifest, source.folder)
    write_file(working / CARD_NAME, card.encode())
    records = sorted([*records, _record(working, CARD_NAME)], key=lambda record: record.name)
    manifest["files"] = [record.to_json() for record in records]
    write_json(working / MANIFEST_NAME, manifest)
    sync_folder(working)
    return manifest


def _card(manifest: Mapping[str, Any], folder: Path) -> str:
    """The first card, before anything was measured later; `qatpack card` writes the others."""
    source = source_card(folder / CARD_NAME)
    return card_text(Results(read_build(manifest)), source, repo=PLACEHOLDER)


def plan_config(plan: Plan) -> dict[str, Any]:
    """The config.json that a plan leads to. Raises `CheckpointError` for a source it cannot."""
    checkpoint, options = plan.layout.checkpoint, plan.options
    try:
        return output_config(
            checkpoint.config,
            plan.ignore,
            text_only=options.text_only,
            pack_ple=any(m.module.endswith("embed_tokens_per_layer") for m in plan.packed),
        )
    except RecursionError:
        raise CheckpointError(f"{checkpoint.folder / 'config.json'}: is nested too deep.") from None
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint.folder / 'config.json'}: {error}") from error


def check_folder(plan: Plan, working: Path) -> None:
    """Read the finished folder back: the tensors planned, and an ignore list that fits them.

    Both ways: every linear that stands dense is ignored, and no packed one is. Raises
    `CheckpointError`, which would be a fault of ours or of the disk.
    """
    written = Checkpoint.open(working)
    expected = {s.name: (s.dtype, s.shape) for unit in plan.units() for s in unit}
    found = {t.name: (t.dtype, t.shape) for t in written.tensors.values()}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise CheckpointError(
                f"{working}: {name} reads back as {found.get(name)}, planned was "
                f"{expected.get(name)}; run again without --resume."
            )
    ignored = written.config["quantization_config"]["ignore"]
    dense = dense_linears(read_layout(written), [n for n in found if not is_packed(n)])
    packed = {m.module for m in plan.packed}
    if set(dense) != set(ignored) or packed & set(ignored):
        raise CheckpointError(
            f"{working / 'config.json'}: ignore list and dense linears differ in "
            f"{sorted(set(dense) ^ set(ignored) | packed & set(ignored))[:3]}."
        )


def _manifest(
    source: Source, plan: Plan, counts: Mapping[str, Counts], sources: Sequence[FileRecord]
) -> dict[str, Any]:
    options, checkpoint = plan.options, plan.layout.checkpoint
    by_source = _by_source(plan, counts)
    return {
        "format": MANIFEST_FORMAT,
        "tool": {"name": "qatpack", "version": version("qatpack")},
        "source": {
            "id": source.id or options.base_model,
            "commit": source.commit,
            "files": [record.to_json() for record in sources],
        },
        "options": {
            "scale_dtype": options.scale_dtype,
            "on_off_grid": "keep" if options.keep_off_grid else "refuse",
            "text_only": options.text_only,
            "pack_ple": options.pack_ple,
            "shard_bytes": options.shard_bytes,
        },
        "text_prefix": {
            "source": plan.layout.prefix,
            "output": plan.output_name(plan.layout.prefix),
        },
        "decode": "bf16(f32(scale) * level)",
        "totals": _totals(plan, sum(by_source.values(), Counts())),
        "packed": [
            {
                "name": tensor.name,
                "shape": list(tensor.shape),
                "modules": sum(m.source is tensor for m in plan.packed),
                **by_source[tensor.name].to_json(),
            }
            for tensor in plan.packed_sources
        ],
        "copied": _names_by_reason(plan.copied),
        "dropped": _names_by_reason(plan.dropped),
        "warnings": list(checkpoint.warnings),
    }


def _settings(folder: Path) -> list[FileRecord]:
    """The source files that decide the output without being copied to it."""
    return [_record(folder, n) for n in ("config.json", INDEX_NAME) if (folder / n).exists()]


def _by_source(plan: Plan, counts: Mapping[str, Counts]) -> dict[str, Counts]:
    sums: dict[str, Counts] = {}
    for module in plan.packed:
        name = module.source.name
        sums[name] = sums.get(name, Counts()) + counts[module.module]
    return sums


def _totals(plan: Plan, counts: Counts) -> dict[str, Any]:
    tensors = plan.layout.checkpoint.tensors
    return {
        "source_tensors": len(tensors),
        "source_bytes": plan.layout.checkpoint.tensor_bytes,
        "packed_tensors": len(plan.packed_sources),
        "packed_modules": len(plan.packed),
        "copied_tensors": len(plan.copied),
        "copied_bytes": sum(tensors[name].nbytes for name in plan.copied),
        "dropped_tensors": len(plan.dropped),
        "dropped_bytes": sum(tensors[name].nbytes for name in plan.dropped),
        "output_tensors": sum(len(unit) for unit in plan.units()),
        "output_bytes": plan.output_bytes(),
        **counts.to_json(),
    }


def _names_by_reason(reasons: Mapping[str, str]) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    return names


def _file_names(folder: Path) -> list[str]:
    """Every file of the folder but the manifest and our journal, relative and sorted."""
    names = (p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    return sorted(n for n in names if n not in (MANIFEST_NAME, JOURNAL_NAME))


def _record(folder: Path, name: str) -> FileRecord:
    path = folder / name
    return FileRecord(name, path.stat().st_size, hash_file(path))
