"""`qatpack evaluate`."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .progress import bars
from .text import one_line, print_json, table, warn

if TYPE_CHECKING:
    from ..checkpoint.source import Source
    from ..evaluate.evaluation import Evaluation
    from ..evaluate.job import Options
    from ..evaluate.texts import Text

WIDTH = 100
LARGEST_BATCH = 4096
"""Caches of more rows would take all memory of the machine."""


class _Batches(click.ParamType):
    """Batch sizes: 1,4,8."""

    name = "n,n,..."

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            sizes = tuple(dict.fromkeys(int(part) for part in str(value).split(",")))
        except ValueError:
            sizes = ()
        if not sizes or min(sizes) < 1 or max(sizes) > LARGEST_BATCH:
            self.fail(
                f"{value!r} is no list of batch sizes from 1 to {LARGEST_BATCH}; write 1,4,8.",
                param,
                ctx,
            )
        return sizes


@click.command()
@click.argument("builds", metavar="BUILD...", nargs=-1, required=True)
@click.option(
    "--reference", metavar="SRC", required=True, help="The bf16 checkpoint: a folder or org/name."
)
@click.option("--revision", help="Branch, tag or commit of a Hub reference.")
@click.option(
    "--only",
    type=click.Choice(["grid", "kl", "greedy", "speed"]),
    multiple=True,
    help="Only these parts; can be repeated. By default all.",
)
@click.option(
    "--text",
    type=click.Path(path_type=Path),
    help="Score this UTF-8 file. By default an essay that comes with qatpack.",
)
@click.option(
    "--dataset",
    type=click.Choice(["wikitext-2"]),
    help="Score the test split of raw WikiText-2, fetched from the Hub at a pinned commit.",
)
@click.option(
    "--protocol",
    type=click.Choice(["consecutive", "llama.cpp"]),
    default="consecutive",
    show_default=True,
    help="consecutive: windows of BOS and the next tokens, every position scored. llama.cpp: "
    "chunks whose first token BOS replaces, the second half scored.",
)
@click.option("--chat", is_flag=True, help="Frame the text as the model's turn (needs jinja2).")
@click.option(
    "--windows",
    type=click.IntRange(1),
    default=8,
    show_default=True,
    help="How many are scored, from the start of the text.",
)
@click.option(
    "--length",
    type=click.IntRange(8),
    default=512,
    show_default=True,
    help="Tokens of a window, BOS included.",
)
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float32"]),
    help="Of activations and dense weights; float32 shows what the packed weights alone do, in "
    "twice the memory. [default: as stored]",
)
@click.option(
    "--decode",
    type=click.Choice(["exact", "fast"]),
    default="fast",
    show_default=True,
    help="Of packed weights in the speed part; the others take exact.",
)
@click.option(
    "--prompt", help='Of greedy match and speed. [default: "The history of the Roman..."]'
)
@click.option(
    "--max-tokens",
    "tokens",
    type=click.IntRange(2),
    default=128,
    show_default=True,
    help="Tokens that continue the prompt; stop tokens are not heeded.",
)
@click.option(
    "--batch",
    "batches",
    type=_Batches(),
    default="1",
    show_default=True,
    help="Batch sizes of the timed runs, such as 1,4,8.",
)
@click.option(
    "--repeats",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    help="Timed runs of a model each time it is on the device.",
)
@click.option(
    "--mesh",
    type=click.IntRange(1),
    help="Devices to spread a model over. By default all, if it does not fit one.",
)
@click.option(
    "--cache-dir",
    "cache",
    type=click.Path(path_type=Path),
    help="Where hidden states and compiled programs are kept. [default: $QATPACK_CACHE or "
    "~/.cache/qatpack]",
)
@click.option("--force", is_flag=True, help="Also builds whose copied tensors differ.")
@click.option(
    "--json",
    "json_file",
    type=click.Path(path_type=Path, allow_dash=True),
    help="Write everything to this file as JSON; - prints that alone.",
)
@click.option(
    "--report",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write evaluation.md and plots (with qatpack[plots]) into this folder.",
)
@click.option("--write", is_flag=True, help="Write evaluation.json into each build's folder.")
def evaluate(
    builds: tuple[str, ...],
    reference: str,
    revision: str | None,
    json_file: Path | None,
    report: Path | None,
    write: bool,
    **chosen: Any,
) -> None:
    """How far are BUILDs from their bf16 reference, and how fast are they?

    Reference and builds run one after another through the same loader, forward pass, text and
    prompt. Printed are the grid, the divergence of the answers, the greedy match and the speed,
    side by side, with every convention.

    Exit status: 0 measured, 1 it could not be, or the reference has a divergence from itself, 2
    wrong usage.

    \b
    Example:
      qatpack evaluate gemma-4-E2B-it-w4a16 --dataset wikitext-2 \\
        --reference google/gemma-4-E2B-it-qat-q4_0-unquantized
    """
    _check_usage(builds, write, **chosen)
    from ..checkpoint.source import resolve_source
    from ..evaluate.run import evaluate as run

    _check_outputs(json_file, report, builds if write else ())
    options = _options(**chosen)
    origin = resolve_source(reference, revision=revision)
    evaluation = run(origin, named_sources(builds), options, bars=bars)
    _show(evaluation, as_json=str(json_file) == "-")
    _write(evaluation, json_file, report, write)
    if not evaluation.repeatable:
        raise click.exceptions.Exit(1)


def _check_usage(
    builds: Sequence[str],
    write: bool,
    *,
    text: Path | None,
    dataset: str | None,
    protocol: str,
    chat: bool,
    **_: Any,
) -> None:
    if text is not None and dataset is not None:
        raise click.UsageError("choose one of --text and --dataset.")
    if chat and protocol == "llama.cpp":
        raise click.UsageError("--chat belongs to --protocol consecutive.")
    for build in builds if write else ():
        if not Path(build).expanduser().is_dir():
            raise click.UsageError(
                f"--write needs folders, and {build} is none: download it to one (hf download "
                "ORG/NAME --local-dir FOLDER) and give that."
            )


def _check_outputs(json_file: Path | None, report: Path | None, folders: Sequence[str]) -> None:
    """Refuse before the long work what could not be written after it."""
    from ..card.files import EVALUATION_NAME
    from ..evaluate.outputs import check_file, check_folder

    if json_file is not None and str(json_file) != "-":
        check_file(json_file)
    if report is not None:
        check_folder(report)
    for folder in folders:
        check_file(Path(folder).expanduser() / EVALUATION_NAME)


def _options(
    *,
    only: tuple[str, ...],
    text: Path | None,
    dataset: str | None,
    protocol: Any,
    chat: bool,
    windows: int,
    length: int,
    prompt: str | None,
    cache: Path | None,
    **others: Any,
) -> Options:
    """What the options ask for; `others` are named as in `Options`."""
    from ..evaluate.devices import cache_home, use_compile_cache
    from ..evaluate.job import PARTS, PROMPT, Options
    from ..evaluate.windows import Protocol

    home = cache or cache_home()
    use_compile_cache(home / "xla")
    parts = tuple(p for p in PARTS if not only or p in only)
    if text is None and dataset is None and "kl" in parts:
        click.echo("scoring the embedded text: name another with --text or --dataset.", err=True)
    return Options(
        parts=parts,
        text=_text(text, dataset, protocol),
        protocol=Protocol(protocol, chat, windows, length),
        prompt=PROMPT if prompt is None else prompt,
        cache=home,
        **others,
    )


def _text(path: Path | None, dataset: str | None, protocol: str) -> Text:
    from ..evaluate.texts import embedded_text, read_text, wikitext

    if path is not None:
        return read_text(path)
    return wikitext(joined=protocol != "llama.cpp") if dataset else embedded_text()


def _show(evaluation: Evaluation, *, as_json: bool) -> None:
    value = evaluation.to_json()
    if as_json:
        print_json(value)
    else:
        print_evaluation(value)
    for message in evaluation.warnings:
        warn(message)


def _write(
    evaluation: Evaluation, json_file: Path | None, report: Path | None, write: bool
) -> None:
    """Every file that was asked for; one that fails does not keep the others from being written.

    Raises `OutputError`: one could not be written.
    """
    from ..evaluate.evaluation import write_evaluation, write_evaluations
    from ..evaluate.outputs import write_all
    from ..evaluate.report import write_report

    value = evaluation.to_json()
    jobs: list[Callable[[], object]] = []
    if json_file is not None and str(json_file) != "-":
        jobs.append(partial(write_evaluation, value, json_file))
    if write:
        jobs.append(partial(write_evaluations, evaluation))
    if report is not None:
        jobs.append(partial(write_report, value, report))
    write_all(jobs)


def named_sources(builds: Sequence[str]) -> list[tuple[str, Source]]:
    """Each build (a folder, or org/name with an optional @revision) with a name of its own."""
    from .verify import resolve_build

    found: dict[str, Source] = {}
    for build in builds:
        source = resolve_build(build)
        name = source.id or source.folder.resolve().name
        if name in found:
            name = next(n for i in range(2, len(builds) + 2) if (n := f"{name} {i}") not in found)
        found[name] = source
    return list(found.items())


def print_evaluation(value: Mapping[str, Any]) -> None:
    """Table, one sentence a build, conventions."""
    from ..evaluate.table import findings, notes, tables

    for rows in tables(value):
        click.echo(table(rows) + "\n")
    for lines in (findings(value), notes(value)):
        for line in lines:
            click.echo(_wrapped(line))
        click.echo()


def _wrapped(text: str) -> str:
    return textwrap.fill(
        one_line(text), WIDTH, subsequent_indent="  ", break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip
