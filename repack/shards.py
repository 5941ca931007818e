"""Writes the shards of a plan: packing, copying and hashing side by side.

Packing keeps the processor busy, copying the disk and hashing another core, so each has a thread
of its own and works through the shards in order.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from ..checkpoint.hashing import BackgroundHasher
from ..checkpoint.manifest import FileRecord
from ..checkpoint.progress import Progress
from ..checkpoint.reader import TensorReader
from ..checkpoint.source import Source
from ..checkpoint.writer import ShardLayout, ShardWriter
from .grid import Counts
from .journal import Journal
from .plan import Plan
from .stream import copy_tensors, pack_tensors, source_bytes

# Shards open at a time: each reserves its space and holds a descriptor and a thread.
IN_FLIGHT = 3


def start_source_hashes(
    plan: Plan, source: Source, hasher: BackgroundHasher
) -> dict[str, Future[str]]:
    """File name -> its sha256 to come, for the source files whose hash the Hub did not tell."""
    if not plan.options.hash_files:
        return {}
    return {
        header.path.name: hasher.submit(header.path)
        for header in plan.layout.checkpoint.files
        if header.path.name not in source.lfs_sha256
    }


def source_records(
    plan: Plan, source: Source, hashes: Mapping[str, Future[str]]
) -> list[FileRecord]:
    """The source's weight files, once their hashes are there."""
    return [
        FileRecord(
            name := header.path.name,
            header.size,
            hashes[name].result() if name in hashes else source.lfs_sha256.get(name),
            from_hub=name in source.lfs_sha256,
        )
        for header in plan.layout.checkpoint.files
    ]


def write_shards(
    plan: Plan, layouts: Sequence[ShardLayout], journal: Journal, progress: Progress
) -> tuple[dict[str, Counts], list[FileRecord]]:
    """Write or reuse every shard; the counts by module and the files' records."""
    modules = {f"{m.module}.weight_packed": m for m in plan.packed}
    counts: dict[str, Counts] = {}
    reused: dict[str, str] = {}
    progress = _one_at_a_time(progress)
    hashes: dict[str, Future[str]] = {}
    with (
        ExitStack() as writers,
        # On an error it still hashes what is committed, for the journal.
        BackgroundHasher(finish=True) as hasher,
        TensorReader() as reader,
        _Copier(progress) as copier,
    ):
        for layout in layouts:
            if entry := journal.reusable(layout):
                reused[layout.file_name] = entry["sha256"]
                counts |= {m: Counts.from_json(c) for m, c in entry["counts"].items()}
                progress(source_bytes(layout, modules))
                continue
            writer = writers.enter_context(ShardWriter(journal.folder, layout))
            packed, committed = copier.submit(writer)
            done = pack_tensors(writer, modules, reader, plan.options.scale_dtype, copier.report)
            packed.set()
            counts |= done
            if plan.options.hash_files:
                hashes[layout.file_name] = hasher.submit(committed)
                journal.enter(layout.file_name, hashes[layout.file_name], done)
        copier.wait()
        known = reused | {name: future.result() for name, future in hashes.items()}
    return counts, [FileRecord(s.file_name, s.size, known.get(s.file_name)) for s in layouts]


def _one_at_a_time(progress: Progress) -> Progress:
    lock = threading.Lock()

    def report(nbytes: int) -> None:
        with lock:
            progress(nbytes)

    return report


class _Copier:
    """Copies the pass-through tensors of shards in turn, and commits each once it is packed too.

    A context manager: an error on the way out stops it at the next chunk.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="copy")
        self._reader = TensorReader()
        self._stopping = False
        self._packed: list[threading.Event] = []
        self._committed: list[Future[Path]] = []

    def submit(self, writer: ShardWriter) -> tuple[threading.Event, Future[Path]]:
        """Queue a shard: the event to set when it is packed, and its path to come.

        Waits while `IN_FLIGHT` shards are not committed. Raises what an earlier one raised.
        """
        if len(self._committed) >= IN_FLIGHT:
            self._committed[-IN_FLIGHT].result()
        packed = threading.Event()
        self._packed.append(packed)
        self._committed.append(self._pool.submit(self._fill, writer, packed))
        return packed, self._committed[-1]

    def report(self, nbytes: int) -> None:
        """Progress of the packing; raises what the copying has raised meanwhile."""
        for future in self._committed[-IN_FLIGHT:]:
            if future.done():
                future.result()
        self._progress(nbytes)

    def wait(self) -> None:
        """Return when all shards are committed; raises what one of them raised."""
        for future in self._committed:
            future.result()

    def _fill(self, writer: ShardWriter, packed: threading.Event) -> Path:
        copy_tensors(writer, self._reader, self._step)
        packed.wait()
        self._check()
        return writer.commit()

    def _step(self, nbytes: int) -> None:
        self._check()
        self._progress(nbytes)

    def _check(self) -> None:
        if self._stopping:
            raise InterruptedError("another part of the repack failed")

    def __enter__(self) -> _Copier:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stopping = kind is not None
        for event in self._packed:
            event.set()
        self._pool.shutdown(cancel_futures=True)
        self._reader.close()
