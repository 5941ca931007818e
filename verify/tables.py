"""Reports as tables: rows of cells for a terminal or for a model card."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ..card.markdown import table
from ..checkpoint.units import percent, share
from .findings import Severity
from .report import DECODE, Report
from .tally import BETWEEN, Tally

Row = tuple[str, ...]

_FIGURES: tuple[tuple[str, Callable[[Tally], str]], ...] = (
    ("relative error", lambda t: percent(t.relative_error)),
    ("  largest of a value", lambda t: percent(t.largest)),
    ("values identical", lambda t: share(t.identical, t.values)),
    ("  before rounding to bf16", lambda t: share(t.unrounded, t.values)),
    ("  scales cast to bf16", lambda t: share(t.cast, t.values)),
    ("groups", lambda t: f"{t.groups:,}"),
    ("  levels as trained", lambda t: share(t.compared - t.levels_differ, t.compared)),
    ("  step = max/7.5", lambda t: share(t.max_7_5, t.nonzero_groups)),
    ("  peak on a level", lambda t: share(t.on_level, t.nonzero_groups)),
    ("  peaks on 8 / 7 / lower", lambda t: _peaks(t)),
)


def build_rows(reports: Sequence[Report]) -> list[Row]:
    """A column for each build, as in the published comparison."""
    rows: list[Row] = [("", *(r.name for r in reports))]
    facts: list[tuple[str, Callable[[Report], str]]] = [
        ("tensors", lambda r: f"{r.stored:,}"),
        ("packed", lambda r: f"{r.packed:,}"),
        ("tied head stored", lambda r: str(r.head or "-")),
        ("scales", lambda r: ", ".join(r.scale_dtypes) or "-"),
    ]
    rows += [(label, *(show(r) for r in reports)) for label, show in facts]
    if any(r.tensors for r in reports):
        for label, figure in _FIGURES:
            rows.append((label, *(figure(r.total) if r.tensors else "-" for r in reports)))
        rows.append(("copied, identical", *map(_copied, reports)))
    rows.append(("errors, warnings, notes", *map(_counts, reports)))
    return rows


def kind_rows(report: Report) -> list[Row]:
    """A row for each kind of packed tensor of one build, and their sum."""
    rows: list[Row] = [
        ("kind", "tensors", "groups", "error", "identical", "levels", "max/7.5", "on a level")
    ]
    rows += [_kind_row(kind.value, n, tally) for kind, (n, tally) in report.kinds().items()]
    return [*rows, _kind_row("all", len(report.tensors), report.total)]


def kinds_by_build(reports: Sequence[Report]) -> list[Row]:
    """Relative error and identical share by kind, a column for each build."""
    kinds = [r.kinds() for r in reports]
    present = dict.fromkeys(kind for found in kinds for kind in found)
    rows: list[Row] = [("error, identical", *(r.name for r in reports))]
    for kind in present:
        rows.append((kind.value, *(_short(k[kind][1]) if kind in k else "-" for k in kinds)))
    return rows


def _short(tally: Tally) -> str:
    return f"{percent(tally.relative_error)}, {share(tally.identical, tally.values)}"


def _kind_row(label: str, count: int, tally: Tally) -> Row:
    return (
        label,
        f"{count:,}",
        f"{tally.groups:,}",
        percent(tally.relative_error),
        share(tally.identical, tally.values),
        share(tally.compared - tally.levels_differ, tally.compared),
        share(tally.max_7_5, tally.nonzero_groups),
        share(tally.on_level, tally.nonzero_groups),
    )


def _peaks(tally: Tally) -> str:
    lower = sum(tally.peak_levels[1:7])
    whole = tally.nonzero_groups
    if not whole:
        return "-"
    shares = (tally.peak_levels[8], tally.peak_levels[7], lower)
    return " / ".join(f"{100 * n / whole:.1f}" for n in shares)


def _copied(report: Report) -> str:
    if report.copied is None:
        return "-"
    whole = len(report.copied.identical) + len(report.copied.differ) + len(report.copied.missing)
    return f"{len(report.copied.identical):,} of {whole:,}"


def _counts(report: Report) -> str:
    return ", ".join(f"{report.count(severity):,}" for severity in Severity)


def conventions(reports: Sequence[Report]) -> str:
    """What the figures mean, in two lines under the table."""
    if not any(r.tensors for r in reports):
        return ""
    part_only = next((r for r in reports if r.sample or r.pattern), None)
    looked = ""
    if part_only is not None and part_only.sample:
        looked = (
            f"\nCompared: {part_only.sample} rows of each packed tensor, the ends of the others."
        )
    if part_only is not None and part_only.pattern:
        looked += f"\nOnly {part_only.pattern}."
    return (
        f"identical: decoded as {DECODE}; cast: bf16(scale) first, as vLLM and transformers.\n"
        "error: Frobenius norm of decoded - reference over that of the reference; peaks in %."
        f"{looked}"
    )


def markdown(rows: Sequence[Row]) -> str:
    """Rows as a Markdown table."""
    return table([[cell.strip().replace("|", "\\|") for cell in row] for row in rows])


def histogram(tally: Tally) -> Iterator[tuple[str, int]]:
    """The level of the stored step on which each group's peak falls, and how many do."""
    yield from ((str(level), tally.peak_levels[level]) for level in range(1, BETWEEN))
    yield "none", tally.peak_levels[BETWEEN]
