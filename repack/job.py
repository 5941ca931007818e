"""The repack of a checkpoint, from an opened source to a finished folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ..card.files import CARD_NAME
from ..card.metadata import source_card
from ..checkpoint.errors import CheckpointError, OutputError
from ..checkpoint.folder import Checkpoint
from ..checkpoint.hashing import BackgroundHasher
from ..checkpoint.output import check_output, sync_folder
from ..checkpoint.progress import Progress, ignore_progress
from ..checkpoint.reader import TensorReader
from ..checkpoint.source import Source
from ..checkpoint.writer import plan_shards
from .finish import finish_folder, plan_config
from .journal import Journal, fingerprint, source_state
from .layout import read_layout
from .plan import Options, Plan, make_plan
from .shards import source_records, start_source_hashes, write_shards
from .stream import find_fault

# Room for what stands beside the shards: tokenizer, config, card, manifest.
SPACE_MARGIN = 128 << 20


def plan_repack(source: Source, options: Options, *, progress: Progress = ignore_progress) -> Plan:
    """Open the source and plan its repack.

    With `options.keep_off_grid` the certificate runs over every candidate first, since one
    tensor's fault decides what becomes of those fused with it; `progress` gets the bytes. Raises
    `CheckpointError` and `GridError` (NaN or Inf).
    """
    checkpoint = Checkpoint.open(source.folder)
    if not checkpoint.config:
        raise CheckpointError(
            f"{source.folder}: has no config.json, or an empty one; no reader can do without."
        )
    layout = read_layout(checkpoint)
    plan = make_plan(layout, options)
    # Now rather than after an hour of packing: the settings that the folder will end with.
    source_card(source.folder / CARD_NAME)
    plan_config(plan)
    if not options.keep_off_grid:
        return plan
    off_grid = _off_grid(plan, progress)
    return make_plan(layout, options, off_grid=off_grid) if off_grid else plan


def _off_grid(plan: Plan, progress: Progress) -> dict[str, str]:
    """Source tensors that do not certify -> the first fault found in each."""
    found: dict[str, str] = {}
    with TensorReader() as reader:
        for module in plan.packed:
            name = module.source.name
            if name not in found and (fault := find_fault(module, reader, progress)):
                found[name] = f"off the grid: {fault}"
    return found


def repack(
    source: Source,
    out: Path,
    options: Options | None = None,
    *,
    resume: bool = False,
    plan: Plan | None = None,
    progress: Progress = ignore_progress,
) -> Mapping[str, Any]:
    """Write the exact W4A16 folder `out` and return its manifest.

    `plan`: from `plan_repack` of the same source, if already made; else `options` decide.
    `progress` gets the source bytes of each step, one call at a time but from several threads.
    Works in `<out>.partial`, which a failed or interrupted run leaves behind for `resume`; `out`
    appears whole or not at all.

    Raises `CheckpointError`, `GridError` or `OutputError`.
    """
    working = check_output(out, source.folder)
    plan = plan or plan_repack(source, options or Options())
    check_space(plan, working)
    layouts = plan_shards(plan.units(), shard_bytes=plan.options.shard_bytes)
    state = source_state(plan)
    with _one_sentence(working):
        journal = Journal.start(working, fingerprint(plan, version("qatpack")), resume=resume)
        try:
            with BackgroundHasher() as hasher:
                hashes = start_source_hashes(plan, source, hasher)
                counts, shards = write_shards(plan, layouts, journal, progress)
                sources = source_records(plan, source, hashes)
            manifest = finish_folder(
                source,
                plan,
                working,
                layouts=layouts,
                counts=counts,
                sources=sources,
                shards=shards,
            )
            if source_state(plan) != state:
                raise CheckpointError(
                    f"{source.folder}: changed while it was read; delete {working} and start anew."
                )
            _publish(working, out.resolve())
            journal.finish(out.resolve())
        finally:
            journal.close()
    return manifest


def free_space(folder: Path) -> int:
    """Free bytes on the disk where `folder` stands or would stand."""
    nearest = next(p for p in (folder, *folder.parents) if p.exists())
    return shutil.disk_usage(nearest).free


def check_space(plan: Plan, working: Path) -> None:
    """Raise `OutputError` when the output does not fit; what `working` holds gives way to it."""
    present = sum(p.stat().st_size for p in working.rglob("*") if p.is_file())
    needed = plan.output_bytes() + SPACE_MARGIN - present
    if (free := free_space(working)) < needed:
        raise OutputError(
            f"{working.parent}: {free / 1e9:.2f} GB free, {needed / 1e9:.2f} GB needed; free some "
            "or choose a folder on another disk."
        )


@contextmanager
def _one_sentence(working: Path) -> Iterator[None]:
    """Turn the system's refusals while writing into one sentence."""
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"{error.filename or working}: {error.strerror or error}; what is finished stands in "
            f"{working}: mend the cause and run again with --resume."
        ) from error


def _publish(working: Path, out: Path) -> None:
    """Give the finished folder its name; `out` is absent or an empty folder."""
    os.replace(working, out)
    sync_folder(out.parent)
