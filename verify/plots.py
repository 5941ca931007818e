"""Two pictures of a report: where peaks fall, and each tensor's error. Needs matplotlib."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from ..checkpoint.errors import QatpackError
from .pairs import Kind
from .report import Report
from .tables import histogram

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def require_matplotlib() -> None:
    """Raise `QatpackError` where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise QatpackError("--plots needs matplotlib: pip install 'qatpack[plots]'.")


def write_plots(report: Report, folder: Path) -> list[Path]:
    """Write NAME-levels.png and NAME-error.png; returns their paths, none without a comparison."""
    require_matplotlib()
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    if not report.tensors:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    stem = report.name.replace("/", "--")
    written = []
    for kind, draw in (("levels", _draw_levels), ("error", _draw_error)):
        figure = Figure(figsize=(8, 4), layout="constrained")
        path = folder / f"{stem}-{kind}.png"
        with rc_context({"text.parse_math": False}):  # a name may hold two $
            draw(report, figure.subplots())
            figure.savefig(path, dpi=120)
        written.append(path)
    return written


def _draw_levels(report: Report, axes: Axes) -> None:
    labels, counts = zip(*histogram(report.total), strict=True)
    whole = max(1, report.total.nonzero_groups)
    bars = axes.bar(labels, [100 * count / whole for count in counts], color="#3b6ea8")
    axes.bar_label(bars, fmt=lambda share: f"{share:.1f} %" if share else "")
    axes.set_ylim(0, 110)
    axes.set_xlabel("level of the stored step on which a group's largest weight falls")
    axes.set_ylabel("groups, %")
    axes.set_title(report.name)


def _draw_error(report: Report, axes: Axes) -> None:
    """A dot for each packed tensor in file order, coloured by kind."""
    for kind in Kind:
        points = [
            (i, 100 * error)
            for i, t in enumerate(report.tensors)
            if t.kind is kind and (error := t.tally.relative_error) is not None
        ]
        if points:
            axes.scatter(*zip(*points, strict=True), s=14, label=kind.value)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("packed tensor, in file order")
    axes.set_ylabel("relative error (Frobenius), %")
    axes.set_title(f"{report.name}: {report.judgement.verdict}")
    axes.legend(ncols=6, fontsize="small")
