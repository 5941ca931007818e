"""`qatpack verify`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .progress import byte_bar
from .repack import start_jax_on_cpu
from .text import one_line, print_json, table

if TYPE_CHECKING:
    from ..checkpoint.source import Source
    from ..verify.job import Options, Reference
    from ..verify.report import Report
    from ..verify.require import Threshold

WIDTH = 100
_LABELS = 26


class _Threshold(click.ParamType):
    """FIGURE=NUMBER, such as identical=1.0."""

    name = "figure=number"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> Threshold:
        from ..verify.require import Threshold

        if isinstance(value, Threshold):
            return value
        try:
            return Threshold.parse(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


@click.command()
@click.argument("builds", metavar="BUILD...", nargs=-1, required=True)
@click.option("--reference", metavar="SRC", help="The bf16 QAT checkpoint: a folder or org/name.")
@click.option("--revision", help="Branch, tag or commit of a Hub reference.")
@click.option("--tensors", metavar="PATTERN", help="Only packed tensors whose name matches.")
@click.option(
    "--sample",
    type=click.IntRange(min=1),
    metavar="N",
    help="Compare N rows of each packed tensor instead of all.",
)
@click.option(
    "--require",
    type=_Threshold(),
    multiple=True,
    help="Fail below a share or above an error: identical=1.0, cast, unrounded, levels, on_level, "
    "relative_error, largest_error. Can be repeated.",
)
@click.option(
    "--rederive",
    is_flag=True,
    help="Prove the build's manifest from the source: hashes, plan, and a share of the tensors "
    "derived again byte for byte. Without --reference the source is fetched that it names.",
)
@click.option(
    "--share",
    type=click.FloatRange(0, 1),
    help="Share of the tensors that --rederive derives.  [default: 0.1]",
)
@click.option("--all", "derive_all", is_flag=True, help="--share 1.")
@click.option(
    "--load",
    type=click.Choice(["transformers", "vllm"]),
    help="Really load the folder in that reader and run it.",
)
@click.option(
    "--plots",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write a level histogram and the error of each tensor as PNG into this folder.",
)
@click.option("--json", "as_json", is_flag=True, help="Print all findings and figures as JSON.")
@click.option("--markdown", "as_markdown", is_flag=True, help="Print the table for a model card.")
@click.option("--write", is_flag=True, help="Write verify_report.json into each build's folder.")
def verify(
    builds: tuple[str, ...],
    reference: str | None,
    revision: str | None,
    tensors: str | None,
    sample: int | None,
    require: tuple[Threshold, ...],
    rederive: bool,
    share: float | None,
    derive_all: bool,
    load: str | None,
    plots: Path | None,
    as_json: bool,
    as_markdown: bool,
    write: bool,
) -> None:
    """Is BUILD exactly the trained model, and does it load where it claims to?

    BUILD is a packed W4A16 folder, or org/name[@revision] on the Hub. With --reference every
    packed value is decoded and compared with the bf16 QAT checkpoint, and every other tensor byte
    for byte. Without it only the folder is checked: its files, its config, what readers demand.

    Exit status: 0 the build holds the trained model and nothing is wrong, 1 it does not, or an
    error was found, 2 wrong usage.

    \b
    Example:
      qatpack verify gemma-4-E2B-it-w4a16 --reference google/gemma-4-E2B-it-qat-q4_0-unquantized
    """
    start_jax_on_cpu()
    if as_json and as_markdown:
        raise click.UsageError("choose one of --json and --markdown.")
    if reference is None and (tensors or sample or require or revision):
        raise click.UsageError("--tensors, --sample, --require and --revision need a --reference.")
    if share != share:
        raise click.UsageError("--share is a number from 0 to 1.")
    if not rederive and (derive_all or share is not None):
        raise click.UsageError("--share and --all belong to --rederive.")
    from ..verify.job import Options
    from ..verify.plots import require_matplotlib, write_plots
    from ..verify.report import write_report

    if plots is not None:
        require_matplotlib()
    sources = [resolve_build(build) for build in builds]
    opened = _reference(reference, revision, sources if rederive else [])
    options = Options(
        pattern=tensors,
        sample=sample,
        load=load,
        rederive=_share(share, derive_all) if rederive else None,
    )
    reports = [_verify(source, opened, options, require) for source in sources]
    if as_json:
        print_json([r.to_json() for r in reports] if len(reports) > 1 else reports[0].to_json())
    elif as_markdown:
        _print_markdown(reports)
    else:
        _print_reports(reports)
    for report in reports if write else ():
        write_report(report, report.build.folder)
    if plots is not None:
        for report in reports:
            write_plots(report, plots)
    if not all(report.passed for report in reports):
        raise click.exceptions.Exit(1)


def _share(share: float | None, derive_all: bool) -> float:
    if derive_all:
        return 1.0
    return 0.1 if share is None else share


def resolve_build(build: str) -> Source:
    """A folder, or org/name with an optional @revision."""
    from ..checkpoint.source import resolve_source

    name, _, revision = build.rpartition("@")
    if name and not Path(build).exists():
        return resolve_source(name, revision=revision)
    return resolve_source(build)


def _reference(
    reference: str | None, revision: str | None, builds: Sequence[Source]
) -> Reference | None:
    """The reference that was named, or else the source that the builds' manifest names."""
    from ..checkpoint.source import resolve_source
    from ..verify.job import open_reference
    from ..verify.provenance import named_source

    if reference is not None:
        return open_reference(resolve_source(reference, revision=revision))
    if not builds:
        return None
    origins = {named_source(build.folder) for build in builds}
    if len(origins) > 1:
        raise click.UsageError("the builds name different sources; give one at a time.")
    name, commit = origins.pop()
    return open_reference(resolve_source(name, revision=commit))


def _verify(
    source: Source, reference: Reference | None, options: Options, require: Sequence[Threshold]
) -> Report:
    from ..verify.job import verify, work_bytes
    from ..verify.require import unmet

    total = work_bytes(source, reference, options)
    with byte_bar(source.folder.name, total) as progress:
        report = verify(source, reference, options, progress=progress)
    return replace(report, findings=(*report.findings, *unmet(report, require)))


def _print_reports(reports: Sequence[Report]) -> None:
    from ..verify.tables import build_rows, conventions, kind_rows, kinds_by_build

    for chunk in _chunks(reports):
        click.echo(table(_cut(build_rows(chunk))) + "\n")
    compared = [r for r in reports if r.tensors]
    if len(reports) == 1 and compared:
        click.echo(table(kind_rows(reports[0])) + "\n")
    elif compared:
        for chunk in _chunks(compared):
            click.echo(table(_cut(kinds_by_build(chunk))) + "\n")
    if said := conventions(reports):
        click.echo(said + "\n")
    for report in reports:
        click.echo(_wrapped(f"{report.name}: {report.judgement.text}."))
    click.echo()
    for report in reports:
        loaded = (f"{report.name}: {said}." for said in report.loaded)
        for line in (*_findings(report), *loaded, *_provenance(report)):
            click.echo(_wrapped(line))


def _findings(report: Report) -> Iterator[str]:
    """Errors first."""
    from ..verify.findings import Severity

    for severity in Severity:
        for finding in report.findings:
            if finding.severity is severity:
                yield f"{severity}: {finding}"


def _provenance(report: Report) -> Iterator[str]:
    if report.provenance is not None:
        yield from (f"proven: {report.name}: {said}." for said in report.provenance.proven)
        yield from (f"not proven: {report.name}: {said}." for said in report.provenance.unproven)


def _print_markdown(reports: Sequence[Report]) -> None:
    from ..verify.tables import build_rows, conventions, markdown

    click.echo(markdown(build_rows(reports)))
    for report in reports:
        click.echo(f"\n**{report.name}**: {report.judgement.text}.")
    if said := conventions(reports):
        click.echo(f"\n{said}")


def _chunks(reports: Sequence[Report]) -> list[Sequence[Report]]:
    """As many builds side by side as fit."""
    most = 3
    return [reports[i : i + most] for i in range(0, len(reports), most)]


def _cut(rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Long build names cut in the middle, so that the table fits `WIDTH`."""
    room = (WIDTH - _LABELS) // (len(rows[0]) - 1) - 2
    names = tuple(n if len(n) <= room else f"{n[: room // 2 - 1]}..{n[-(room // 2 - 1) :]}"
                  for n in rows[0][1:])  # fmt: skip
    return [(rows[0][0], *names), *rows[1:]]


def _wrapped(text: str) -> str:
    import textwrap

    return textwrap.fill(
        one_line(text),
        WIDTH,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
