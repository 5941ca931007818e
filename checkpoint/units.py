"""How sizes, shares and foreign names are written: the same in tables, verdicts and cards."""

from __future__ import annotations


def size(nbytes: float) -> str:
    """Bytes in decimal units: 950 B, 12.3 kB, 4.56 MB, 10.21 GB."""
    for unit in ("B", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:,.2f} GB"


def share(part: float, whole: float) -> str:
    """A percentage that says 100 or 0 only where it is; "-" of nothing."""
    if not whole:
        return "-"
    if part in (0, whole):
        return "100 %" if part else "0 %"
    return f"{min(99.999, max(0.001, 100 * part / whole)):.3f} %"


def percent(value: float | None) -> str:
    """An error as a percentage of three digits; "-" of none."""
    if value is None:
        return "-"
    return "0" if value == 0 else f"{100 * value:.3g} %"


def escaped(text: str) -> str:
    """The text as one line, control characters (of a hostile tensor name, say) escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
