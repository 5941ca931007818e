"""`qatpack demo`."""

from __future__ import annotations

import shutil
from importlib.resources import as_file, files
from pathlib import Path
from shlex import quote

import click

from .evaluate import print_evaluation
from .progress import bars, byte_bar
from .repack import start_jax_on_cpu
from .text import warn

SCALES = ("bfloat16", "float32")


@click.command()
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("qatpack-demo"),
    show_default=True,
    help="New folder for the checkpoint and its builds.",
)
def demo(out: Path) -> None:
    """Run the whole job on the small checkpoint that comes with qatpack.

    Copies it to OUT/reference; rounds it anew to OUT/rerounded, as Google's export does; repacks it
    to OUT/bfloat16 and OUT/float32; verifies the three, evaluates them side by side, and writes
    OUT/report. OUT/cache keeps the evaluation's hidden states and can be deleted.

    \b
    Example:
      qatpack demo --out /tmp/qatpack-demo
    """
    start_jax_on_cpu()
    from ..checkpoint.source import resolve_source
    from ..demo.rerounded import export
    from ..evaluate.job import Options
    from ..evaluate.report import write_report
    from ..evaluate.run import evaluate
    from ..repack.job import repack
    from ..repack.plan import Options as RepackOptions

    _fill(out)
    reference = resolve_source(out / "reference")
    export(out / "reference", out / "rerounded")
    for dtype in SCALES:
        with byte_bar(f"{dtype}: repacking", 0) as progress:
            repack(reference, out / dtype, RepackOptions(scale_dtype=dtype), progress=progress)
    builds = [(name, resolve_source(out / name)) for name in ("rerounded", *SCALES)]
    # float32: so small a model changes less by its steps than by the rounding of activations.
    # exact: one compilation for fidelity and speed, which tells nothing at this size anyway.
    options = Options(cache=out / "cache", dtype="float32", decode="exact")
    evaluation = evaluate(reference, builds, options, bars=bars)
    value = evaluation.to_json()
    print_evaluation(value)
    for message in evaluation.warnings:
        warn(message)
    written = write_report(value, out / "report")
    click.echo(
        f"The folders stand in {out}, the report ({len(written)} files) in {out / 'report'}.\n"
        f"Next: qatpack verify {quote(str(out / 'bfloat16'))} "
        f"--reference {quote(str(out / 'reference'))}"
    )
    ours = [b["grid"]["verdict"]["good"] for b in value["builds"] if b["name"] in SCALES]
    if not (all(ours) and evaluation.repeatable):
        raise click.exceptions.Exit(1)


def _fill(out: Path) -> None:
    """Make OUT and copy the embedded checkpoint to OUT/reference."""
    from ..checkpoint.errors import OutputError

    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise OutputError(f"{out}: is there and not empty; name a new folder with --out.")
        out.mkdir(parents=True, exist_ok=True)
        with as_file(files("qatpack.demo") / "checkpoint") as embedded:
            shutil.copytree(embedded, out / "reference.partial")
        (out / "reference.partial").rename(out / "reference")
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise OutputError(f"{out}: cannot be filled ({reason}); choose another --out.") from error
