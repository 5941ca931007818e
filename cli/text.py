"""How figures and tables are printed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click


def size(nbytes: float) -> str:
    """Bytes in decimal units: 950 B, 12.3 kB, 4.56 MB, 10.21 GB."""
    for unit in ("B", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:,.2f} GB"


def share(part: float, whole: float) -> str:
    """A percentage that says 100 % only where it is; "-" of nothing."""
    if not whole:
        return "-"
    if part == whole:
        return "100 %"
    return f"{min(99.999, 100 * part / whole):.3f} %"


def table(rows: Sequence[Sequence[object]], *, header: bool = True) -> str:
    """Rows as aligned columns: the first to the left, the others to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
    if header:
        lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def print_json(value: Any) -> None:
    """JSON on stdout, and nothing else."""
    from ..checkpoint.writer import json_text

    click.echo(json_text(value))


def warn(message: str) -> None:
    """A warning on stderr."""
    click.echo(f"warning: {one_line(message)}", err=True)


def one_line(message: str) -> str:
    """A message as one line, control characters (of a hostile tensor name, say) escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in message)
