"""The files of a folder that a card is made from, and the card: their names and formats."""

from __future__ import annotations

import re
from pathlib import Path

CARD_NAME = "README.md"
ORIGINAL_CARD_NAME = "ORIGINAL_README.md"
VERIFY_NAME, VERIFY_FORMAT = "verify_report.json", "qatpack.verify/1"
EVALUATION_NAME, EVALUATION_FORMAT = "evaluation.json", "qatpack.evaluation/1"
PLOTS = "plots"
"""Folder of the pictures: `qatpack verify BUILD --reference SRC --plots BUILD/plots`."""

_PLOT = re.compile(r"[\w.-]+\.png", re.ASCII)


def plot_names(folder: Path) -> tuple[str, ...]:
    """The pictures in `plots/`, as paths relative to the folder, sorted."""
    inner = folder / PLOTS
    if not inner.is_dir():
        return ()
    names = (p.name for p in inner.iterdir() if p.is_file() and _PLOT.fullmatch(p.name))
    return tuple(f"{PLOTS}/{name}" for name in sorted(names))
