"""How figures and tables are printed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from ..checkpoint.hub import redact
from ..checkpoint.units import escaped


def table(rows: Sequence[Sequence[object]], *, header: bool = True) -> str:
    """Rows as aligned columns: the first to the left, the others to the right."""
    cells = [[one_line(str(cell)) for cell in row] for row in rows]
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
    from ..checkpoint.output import json_text

    click.echo(json_text(value))


def warn(message: str) -> None:
    """A warning on stderr."""
    click.echo(f"warning: {one_line(message)}", err=True)


def one_line(message: str) -> str:
    """A message as one line, tokens hidden, control characters (of a hostile name, say) escaped."""
    return escaped(redact(message))
