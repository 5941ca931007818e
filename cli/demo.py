"""`qatpack demo`."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, get_args

import click

from .progress import byte_bar
from .repack import start_jax_on_cpu, summary_rows
from .text import table


@click.command()
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("qatpack-demo"),
    show_default=True,
    help="New folder for the checkpoint and its builds.",
)
def demo(out: Path) -> None:
    """Run the main job on the small checkpoint that comes with qatpack.

    Copies it to OUT/reference and repacks it to OUT/bfloat16, OUT/float16 and OUT/float32.

    \b
    Example:
      qatpack demo --out /tmp/qatpack-demo
    """
    start_jax_on_cpu()
    from ..checkpoint.errors import OutputError
    from ..checkpoint.source import Source, resolve_source
    from ..repack.job import repack
    from ..repack.plan import Options, ScaleDtype

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
    reference: Source = resolve_source(str(out / "reference"))
    builds: list[tuple[str, Mapping[str, Any]]] = []
    for dtype in get_args(ScaleDtype):
        options = Options(scale_dtype=dtype)
        with byte_bar(dtype, 0) as progress:
            manifest = repack(reference, out / dtype, options, progress=progress)
        builds.append((dtype, manifest))
    click.echo(table(summary_rows(builds)))
    click.echo(
        f"\nidentical: decoded as {builds[0][1]['decode']}.\n"
        f"The folders stand in {out}.\nNext: qatpack inspect {out / 'reference'}"
    )
