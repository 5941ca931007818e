"""What an interrupted run has finished, so that the next one need not do it again."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from ..checkpoint.errors import CheckpointError, OutputError
from ..checkpoint.folder import read_json
from ..checkpoint.hashing import hash_file
from ..checkpoint.output import write_json
from ..checkpoint.writer import ShardLayout
from .grid import Counts
from .plan import Plan

JOURNAL_NAME = "qatpack-progress.json"


class Journal:
    """The finished shards of the working folder `<out>.partial`, one writer at a time.

    Invariant: a shard is entered only after its bytes are under their final name and hashed, and
    is trusted only if the plan is the same and the hash still matches.
    """

    def __init__(self, folder: Path, fingerprint: str) -> None:
        self.folder = folder
        self._fingerprint = fingerprint
        self._shards: dict[str, dict[str, Any]] = {}
        self._writing = threading.Lock()
        self._held = _lock(folder)

    @classmethod
    def start(cls, folder: Path, fingerprint: str, *, resume: bool) -> Journal:
        """Create the working folder, or with `resume` take up the one that is there.

        Raises `OutputError`: another run holds it, it is left from an earlier run and `resume` is
        not asked, that run had another source, version or options, or it is none of ours.
        """
        existed = folder.exists()
        if existed and not resume:
            os.close(_lock(folder))  # raises where a run is still at work
            raise OutputError(
                f"{folder}: is left from an unfinished run; add --resume to go on with it, or "
                "delete it to start anew."
            )
        folder.mkdir(parents=True, exist_ok=True)
        journal = cls(folder, fingerprint)
        try:
            if existed and any(folder.iterdir()):
                journal._load()
                journal._clear()
            journal._write()
        except BaseException:
            journal.close()
            raise
        return journal

    def _load(self) -> None:
        path = self.folder / JOURNAL_NAME
        if not path.exists():
            raise OutputError(
                f"{self.folder}: holds files but no {JOURNAL_NAME}, so it was not left by a "
                "repack; move it away or choose another output."
            )
        try:
            content = read_json(path)
            known, self._shards = content["fingerprint"], dict(content["shards"])
        except (CheckpointError, LookupError, TypeError, ValueError) as error:
            raise OutputError(
                f"{path}: cannot be read as a journal; delete {self.folder} to start anew."
            ) from error
        if known != self._fingerprint:
            raise OutputError(
                f"{self.folder}: was begun from another source, with other options or another "
                "version of qatpack; delete it to start anew."
            )

    def _clear(self) -> None:
        """Remove all that a killed run left except recorded shards: halves, stale sidecars."""
        for path in sorted(self.folder.rglob("*"), reverse=True):
            name = path.relative_to(self.folder).as_posix()
            if path.is_dir() and not path.is_symlink():
                path.rmdir()
            elif name != JOURNAL_NAME and name not in self._shards:
                path.unlink()

    def _write(self) -> None:
        content = {"fingerprint": self._fingerprint, "shards": self._shards}
        write_json(self.folder / JOURNAL_NAME, content)

    def reusable(self, layout: ShardLayout) -> Mapping[str, Any] | None:
        """The entry of a finished shard whose bytes still have their hash, else None."""
        entry = self._shards.get(layout.file_name)
        path = self.folder / layout.file_name
        if entry is None or not path.is_file() or path.stat().st_size != layout.size:
            return None
        return entry if hash_file(path) == entry["sha256"] else None

    def enter(self, file_name: str, sha256: Future[str], counts: Mapping[str, Counts]) -> None:
        """Record a packed shard as soon as it is committed and hashed, if it ever is."""

        def record(done: Future[str]) -> None:
            if done.cancelled() or done.exception() is not None:
                return
            with self._writing:
                self._shards[file_name] = {
                    "sha256": done.result(),
                    "counts": {module: c.to_json() for module, c in counts.items()},
                }
                # A journal that cannot be written costs a resumed run time, nothing else.
                with contextlib.suppress(OSError):
                    self._write()

        sha256.add_done_callback(record)

    def finish(self, folder: Path) -> None:
        """Remove the journal from the finished folder, by its final name."""
        (folder / JOURNAL_NAME).unlink(missing_ok=True)

    def close(self) -> None:
        """Give up the lock."""
        if self._held >= 0:
            os.close(self._held)
            self._held = -1


def _lock(folder: Path) -> int:
    """Hold the folder itself; the kernel lets go when the process ends, however it ends."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise OutputError(f"{folder}: another qatpack is writing there; let it finish.") from None
    except OSError:
        pass  # a file system without locks
    return descriptor


def source_state(plan: Plan) -> list[tuple[str, int, int, int]]:
    """Name, size, time and inode of every weight file: what a changed source would change."""
    states = ((h.path.name, h.path.stat()) for h in plan.layout.checkpoint.files)
    return [(name, s.st_size, s.st_mtime_ns, s.st_ino) for name, s in states]


def fingerprint(plan: Plan, version: str) -> str:
    """A hash of all that decides the output's bytes, and of the source files' state."""
    checkpoint = plan.layout.checkpoint
    options = plan.options
    files = source_state(plan)
    tensors = [(t.name, t.dtype, t.shape, t.offset) for t in checkpoint.tensors.values()]
    content = [
        version,
        options.scale_dtype,
        options.text_only,
        options.pack_ple,
        options.shard_bytes,
        files,
        tensors,
        [m.module for m in plan.packed],
        sorted(plan.dropped),
    ]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
