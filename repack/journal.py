"""What an interrupted run has finished, so that the next one need not do it again."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from ..checkpoint.errors import OutputError
from ..checkpoint.folder import read_json
from ..checkpoint.hashing import hash_file
from ..checkpoint.writer import ShardLayout, write_json
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
        self._expected: dict[str, tuple[Future[str], dict[str, Any]]] = {}
        self._lock = _lock(folder)

    @classmethod
    def start(cls, folder: Path, fingerprint: str, *, resume: bool) -> Journal:
        """Create the working folder, or with `resume` take up the one that is there.

        Raises `OutputError`: another run holds it, it is left from an earlier run and `resume` is
        not asked, or that run had another source, version or options.
        """
        existed = folder.exists()
        if existed and not resume:
            raise OutputError(
                f"{folder}: is left from an unfinished run; add --resume to go on with it, or "
                "delete it to start anew."
            )
        folder.mkdir(parents=True, exist_ok=True)
        journal = cls(folder, fingerprint)
        if existed:
            journal._load()
            journal._clear()
        return journal

    def _load(self) -> None:
        path = self.folder / JOURNAL_NAME
        if not path.exists():
            return
        content = read_json(path)
        if content.get("fingerprint") != self._fingerprint:
            self.close()
            raise OutputError(
                f"{self.folder}: was begun from another source, with other options or another "
                "version of qatpack; delete it to start anew."
            )
        self._shards = content["shards"]

    def _clear(self) -> None:
        """Remove all that a killed run left except recorded shards: halves, stale sidecars."""
        for path in sorted(self.folder.rglob("*"), reverse=True):
            name = path.relative_to(self.folder).as_posix()
            if path.is_dir() and not path.is_symlink():
                path.rmdir()
            elif name != JOURNAL_NAME and name not in self._shards:
                path.unlink()

    def reusable(self, layout: ShardLayout) -> Mapping[str, Any] | None:
        """The entry of a finished shard whose bytes still have their hash, else None."""
        entry = self._shards.get(layout.file_name)
        path = self.folder / layout.file_name
        if entry is None or not path.is_file() or path.stat().st_size != layout.size:
            return None
        return entry if hash_file(path) == entry["sha256"] else None

    def expect(self, file_name: str, sha256: Future[str], counts: Mapping[str, Counts]) -> None:
        """Announce a finished shard whose hash is still being computed."""
        self._expected[file_name] = sha256, {m: c.to_json() for m, c in counts.items()}

    def save_finished(self, *, wait: bool = False) -> None:
        """Record the announced shards whose hash is known by now; with `wait`, all of them."""
        ready = [name for name, (sha256, _) in self._expected.items() if wait or sha256.done()]
        for name in ready:
            sha256, counts = self._expected.pop(name)
            self._shards[name] = {"sha256": sha256.result(), "counts": counts}
        if ready:
            content = {"fingerprint": self._fingerprint, "shards": self._shards}
            write_json(self.folder / JOURNAL_NAME, content)

    def sha256(self, file_name: str) -> str | None:
        """The hash of a recorded shard; None for one that was not hashed."""
        return self._shards.get(file_name, {}).get("sha256")

    def finish(self) -> None:
        """Remove the journal from the folder and give up the lock."""
        (self.folder / JOURNAL_NAME).unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Give up the lock."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


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


def fingerprint(plan: Plan, version: str) -> str:
    """A hash of all that decides the output's bytes, and of the source files' size and time."""
    checkpoint = plan.layout.checkpoint
    options = plan.options
    files = [(h.path.name, h.size, h.path.stat().st_mtime_ns) for h in checkpoint.files]
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
