"""sha256 of files, on threads beside the work that reads and writes them."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from .errors import CheckpointError

CHUNK = 1 << 23


def hash_file(path: Path, *, progress: Callable[[int], object] | None = None) -> str:
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
    """Hashes files on two threads; a context manager that stops them on the way out.

    hashlib works without the interpreter lock, so this takes the core that the packing leaves.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="sha256")
        self._stop = threading.Event()

    def submit(self, path: Path) -> Future[str]:
        """The future sha256 of `path`."""
        return self._pool.submit(hash_file, path, progress=self._check)

    def _check(self, _: int) -> None:
        if self._stop.is_set():
            raise InterruptedError

    def __enter__(self) -> BackgroundHasher:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._stop.set()
        self._pool.shutdown(cancel_futures=kind is not None)
