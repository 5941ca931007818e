"""Where results are written: refused before the long work if it cannot be, not after it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from ..checkpoint.errors import OutputError

T = TypeVar("T")


def check_file(path: Path) -> None:
    """Raise `OutputError` where a file cannot be written to `path`; its folder has to be there."""
    if path.exists() and not path.is_file():
        raise OutputError(f"{path}: is no plain file; name another.")
    if not path.parent.is_dir():
        raise OutputError(f"{path}: its folder is not there; make it first, or name another file.")
    _probe(path.parent, path)


def check_folder(folder: Path) -> None:
    """Raise `OutputError` where `folder` cannot be made, or no file in it."""
    nearest = next(p for p in (folder, *folder.parents) if p.exists())
    if not nearest.is_dir():
        raise OutputError(f"{nearest}: is no folder; name another than {folder}.")
    _probe(nearest, folder)


def _probe(folder: Path, target: Path) -> None:
    """Make a file there: permissions alone say nothing to root, or of a full or read-only disk."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise unwritable(target, error) from error


def write_all(jobs: Iterable[Callable[[], T]]) -> list[T]:
    """Run every one of some writers, and return what they gave.

    Raises one `OutputError` at the end where some could not write.
    """
    done: list[T] = []
    failed: list[str] = []
    for job in jobs:
        try:
            done.append(job())
        except OutputError as error:
            failed.append(str(error))
    if failed:
        raise OutputError(" ".join(failed))
    return done


def unwritable(path: Path, error: OSError) -> OutputError:
    """The one sentence for a path that could not be written."""
    return OutputError(f"{path}: cannot be written ({error.strerror}); choose another place.")
