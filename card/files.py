"""The files of a folder that a card is made from, and the card: their names and formats."""

from __future__ import annotations

import os
import re
from pathlib import Path
from stat import S_ISREG

from ..checkpoint.errors import CheckpointError

CARD_NAME = "README.md"
ORIGINAL_CARD_NAME = "ORIGINAL_README.md"
VERIFY_NAME, VERIFY_FORMAT = "verify_report.json", "qatpack.verify/1"
EVALUATION_NAME, EVALUATION_FORMAT = "evaluation.json", "qatpack.evaluation/1"
PLOTS = "plots"
"""Folder of the pictures: `qatpack verify BUILD --reference SRC --plots BUILD/plots`."""

_PLOT = re.compile(r"[\w.-]+\.png", re.ASCII)
_PNG = b"\x89PNG\r\n\x1a\n"


def check_own(folder: Path, name: str) -> None:
    """Raise `CheckpointError` unless the file lies in the folder itself, without any link."""
    for part in (*Path(name).parents[-2::-1], Path(name)):
        if (folder / part).is_symlink():
            raise CheckpointError(
                f"{folder / part}: is a link to {os.readlink(folder / part)}, and only files of "
                "the folder itself may be published; put a copy in its place."
            )
    path = folder / name
    if path.exists() and not S_ISREG(path.lstat().st_mode):
        raise CheckpointError(f"{path}: is no regular file; remove it.")


def plot_names(folder: Path) -> tuple[str, ...]:
    """The pictures in `plots/`, as paths relative to the folder, sorted.

    Raises `CheckpointError` for one that is a link or no PNG.
    """
    inner = folder / PLOTS
    if not inner.is_dir():
        return ()
    found = sorted(p.name for p in inner.iterdir() if _PLOT.fullmatch(p.name))
    names = tuple(f"{PLOTS}/{name}" for name in found)
    for name in names:
        check_own(folder, name)
        if not _is_png(folder / name):
            raise CheckpointError(f"{folder / name}: is no PNG picture; remove it.")
    return names


def _is_png(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(len(_PNG)) == _PNG
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}.") from error
