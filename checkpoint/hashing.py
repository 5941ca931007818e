"""sha256 of files, on threads beside the work that reads and writes them."""

from __future__ import annotations

import hashlib
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from .errors import CheckpointError
from .progress import Progress

CHUNK = 1 << 23


def hash_file(path: Path, *, progress: Progress | None = None) -> str:
    """The sha256 of a file, hex, in bounded memory; `progress` gets the bytes of each step."""
    digest = hashlib.sha256()
    buffer = bytearray(CHUNK)
    try:
        with open(path, "rb", buffering=0) as file:
            while count := file.readinto(buffer):
                digest.update(memoryview(buffer)[:count])
                if progress is not None:
                    progress(count)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}.") from error
    return digest.hexdigest()


class BackgroundHasher:
    """Hashes files in turn on a thread; a context manager that waits for it.

    When an error leaves, it stops at once, or with `finish` after what can still be hashed.
    hashlib works without the interpreter lock, so this takes a core that the packing leaves.
    """

    def __init__(self, *, finish: bool = False) -> None:
        self._finish = finish
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sha256")
        self._stopping = False

    def submit(self, path: Path | Future[Path]) -> Future[str]:
        """The future sha256 of a file, or of one that is still to come."""
        return self._pool.submit(self._hash, path)

    def _hash(self, path: Path | Future[Path]) -> str:
        found = path if isinstance(path, Path) else path.result()
        return hash_file(found, progress=self._check)

    def _check(self, _: int) -> None:
        if self._stopping:
            raise InterruptedError("another part of the job failed")

    def __enter__(self) -> BackgroundHasher:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stopping = kind is not None and not self._finish
        self._pool.shutdown(cancel_futures=self._stopping)
