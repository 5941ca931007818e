"""The folder that is written: where it may stand, and small files written whole."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

from .errors import OutputError


def check_output(out: Path, source: Path) -> Path:
    """The working folder `<out>.partial` for `out`, after checking that both can be made.

    Raises `OutputError`: one of them is the source (also through a link), holds it or lies inside
    it; `out` exists and is not an empty folder, or is a mount point; `<out>.partial` is no folder;
    their parent cannot be written.
    """
    try:
        resolved, origin = out.resolve(), source.resolve()
    except (OSError, RuntimeError) as error:
        raise OutputError(f"{out}: cannot be resolved ({error}); choose another output.") from error
    if not out.name or resolved == Path.cwd():
        raise OutputError(f"{str(out)!r}: is the current folder; name a new one.")
    working = resolved.with_name(resolved.name + ".partial")
    if working.is_symlink() or (working.exists() and not working.is_dir()):
        raise OutputError(f"{working}: is needed for the work and is no folder; remove it.")
    for folder in (resolved, working):
        if folder == origin or origin in folder.parents or folder in origin.parents:
            raise OutputError(
                f"{folder}: is, holds or lies inside the source {source}; choose another output."
            )
    if out.is_symlink() and not out.exists():
        raise OutputError(f"{out}: is a link to nothing; name a new folder.")
    if resolved.exists():
        if not resolved.is_dir():
            raise OutputError(f"{out}: is a file; name a new folder.")
        if any(resolved.iterdir()):
            raise OutputError(f"{out}: is not empty; name a new folder or empty this one.")
        if resolved.is_mount():
            raise OutputError(f"{out}: is a mount point; name a new folder inside it.")
    _check_parent(resolved.parent)
    return working


def _check_parent(parent: Path) -> None:
    nearest = next(p for p in (parent, *parent.parents) if p.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise OutputError(f"{parent}: cannot be written to; choose a folder that you may write.")


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, data: bytes) -> None:
    """Write a small file whole: temporary name, fsync, rename.

    The name is this process's and thread's own: two that write one file keep out of each other's.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)  # a full disk does not say where
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: object) -> None:
    """Write `value` as indented JSON with a final newline, as `write_file` does."""
    write_file(path, (json_text(value) + "\n").encode())


def json_text(value: object) -> str:
    """Indented JSON, in ASCII escapes where a name is no valid Unicode."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, indent=2)
    return text
