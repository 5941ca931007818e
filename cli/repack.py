"""`qatpack repack`."""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from ..checkpoint.hub import HUB_ID
from ..checkpoint.units import share, size
from .progress import byte_bar
from .text import print_json, table, warn

if TYPE_CHECKING:
    from ..checkpoint.source import Source
    from ..repack.plan import Options, Plan, ScaleDtype

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


class _Size(click.ParamType):
    """A number of bytes: 5GB, 500MB, 5000000000."""

    name = "size"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        if isinstance(value, int):
            return value
        text = str(value).strip().upper()
        number = text.rstrip("KMGTB")
        try:
            nbytes = int(float(number) * _UNITS[text[len(number) :].strip()])
        except (ValueError, KeyError, OverflowError):
            self.fail(f"{value!r} is no size; write 5GB, 500MB or a number of bytes.", param, ctx)
        if not 0 < nbytes < 2**63:
            self.fail("must be more than nothing, and a size that a file can have.", param, ctx)
        return nbytes


def hub_id(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """An option or argument that is `org/name`."""
    if value is not None and not HUB_ID.fullmatch(value):
        raise click.BadParameter(f"{value!r} is no Hub id; write org/name.", ctx, param)
    return value


def start_jax_on_cpu() -> None:
    """Import JAX off accelerators: the recovery needs exactly rounded float32, and no TPU lock.

    Ctrl-C ends the process at once meanwhile: jaxlib crashes on a KeyboardInterrupt in its import.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        import_module("jax.numpy")
    finally:
        signal.signal(signal.SIGINT, handler)


@click.command()
@click.argument("source", metavar="SRC")
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@click.option("--revision", help="Branch, tag or commit of a Hub source.")
@click.option(
    "--scale-dtype",
    type=click.Choice(["bfloat16", "float16", "float32"]),
    default="bfloat16",
    show_default=True,
    help="How steps are stored. bfloat16: what vLLM and transformers compute with, the size of "
    "the official export. float32: every value bit for bit where the reader multiplies in "
    "float32, 2 bytes more a group. float16: nearly that at bfloat16's size.",
)
@click.option(
    "--on-off-grid",
    type=click.Choice(["refuse", "keep"]),
    default="refuse",
    show_default=True,
    help="A tensor that is on no 4-bit grid: stop, or leave it and those fused with it in bf16.",
)
@click.option("--text-only", is_flag=True, help="Drop the vision and audio towers.")
@click.option(
    "--pack-ple",
    is_flag=True,
    help="Pack the per-layer embedding too. Read by vLLM >= 0.29 on GPU and by qatpack, not by "
    "transformers.",
)
@click.option(
    "--shard-size",
    type=_Size(),
    default="5GB",
    show_default=True,
    help="Most tensor bytes of a file; a larger tensor gets one of its own.",
)
@click.option("--no-hash", is_flag=True, help="Skip sha256 of weight files (and their --resume).")
@click.option(
    "--base-model",
    metavar="ORG/NAME",
    callback=hub_id,
    help="Hub id of a local SRC, for the card and the manifest.",
)
@click.option("--resume", is_flag=True, help="Go on with OUT.partial of an interrupted run.")
@click.option("--dry-run", is_flag=True, help="Print the plan, write no output.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan or manifest as JSON.")
def repack(
    source: str,
    out: Path,
    revision: str | None,
    scale_dtype: ScaleDtype,
    on_off_grid: Literal["refuse", "keep"],
    text_only: bool,
    pack_ple: bool,
    shard_size: int,
    no_hash: bool,
    base_model: str | None,
    resume: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Write SRC's trained 4-bit grid as an exact W4A16 folder OUT.

    SRC is a bf16 QAT checkpoint: a folder, or org/name on the Hub, which is downloaded into its
    cache first. Every group's step and levels
    are recovered and proven by decoding them back; nothing is rounded again. OUT appears only
    when it is whole; until then the work stands in OUT.partial.

    \b
    Example:
      qatpack repack google/gemma-4-E2B-it-qat-q4_0-unquantized gemma-4-E2B-it-w4a16 --dry-run
    """
    start_jax_on_cpu()
    from ..checkpoint.output import check_output
    from ..checkpoint.source import resolve_source
    from ..repack import job
    from ..repack.plan import Options

    options = Options(
        scale_dtype=scale_dtype,
        keep_off_grid=on_off_grid == "keep",
        text_only=text_only,
        pack_ple=pack_ple,
        shard_bytes=shard_size,
        hash_files=not no_hash,
        base_model=base_model,
    )
    check_output(out, Path(source))  # before a download, that is; a Hub id is no path to clash with
    origin = resolve_source(source, revision=revision)
    working = check_output(out, origin.folder)
    plan = _plan(origin, options, working)
    for message in plan.layout.checkpoint.warnings:
        warn(message)
    if dry_run:
        free = job.free_space(working)
        print_json({**plan.summary(), "free_bytes": free}) if as_json else _print_plan(
            plan, out, free
        )
        return
    with byte_bar("repack", plan.source_bytes) as progress:
        manifest = job.repack(origin, out, options, plan=plan, resume=resume, progress=progress)
    print_json(manifest) if as_json else _print_summary(manifest, source, out)


def _plan(origin: Source, options: Options, working: Path) -> Plan:
    """The plan; with --on-off-grid keep, after certifying every candidate."""
    from ..repack.job import check_space, plan_repack

    first = plan_repack(origin, replace(options, keep_off_grid=False))
    if not options.keep_off_grid:
        return first
    check_space(first, working)
    with byte_bar("certify", first.packed_source_bytes) as progress:
        return plan_repack(origin, options, progress=progress)


def _print_plan(plan: Plan, out: Path, free: int) -> None:
    summary = plan.summary()
    rows = [("", "tensors", "bytes"), ("packed", *_pair(summary["packed"]))]
    rows += [(f"copied: {r}", *_pair(c)) for r, c in summary["copied"].items()]
    rows += [(f"dropped: {r}", *_pair(c)) for r, c in summary["dropped"].items()]
    rows += [("source", *_pair(summary["source"])), ("output", *_pair(summary["output"]))]
    click.echo(table(rows))
    click.echo(f"\n{size(free)} free at {out.absolute().parent}. Nothing was written.")
    if not plan.options.keep_off_grid:
        click.echo("Whether every packed tensor is on its grid is proven by the repack itself.")


def _pair(counted: Mapping[str, int]) -> tuple[str, str]:
    return f"{counted['tensors']:,}", size(counted["bytes"])


def _print_summary(manifest: Mapping[str, Any], source: str, out: Path) -> None:
    click.echo(table(summary_rows([(out.name, manifest)])))
    click.echo(f"\n{scale_note(manifest)}")
    made, origin = shlex.quote(str(out)), shlex.quote(source)
    click.echo(f"\nNext: qatpack verify {made} --reference {origin}\n      vllm serve {made}")


def summary_rows(builds: Sequence[tuple[str, Mapping[str, Any]]]) -> list[tuple[str, ...]]:
    """A column for each repacked folder: what it holds and what was proven."""
    totals = [manifest["totals"] for _, manifest in builds]
    lines: list[tuple[str, Callable[[Mapping[str, Any]], str]]] = [
        ("packed tensors", lambda t: f"{t['packed_tensors']:,}"),
        ("groups of 32", lambda t: f"{t['groups']:,}"),
        ("  certified", lambda t: share(t["certified"] + t["zero"], t["groups"])),
        ("  on a bfloat16 step", lambda t: share(t["exact_bf16"], t["certified"])),
        ("values identical", lambda t: share(t["identical"], t["values"])),
        ("  stored as +0, were -0", lambda t: f"{t['negative_zeros']:,}"),
        ("copied tensors", lambda t: f"{t['copied_tensors']:,}"),
        ("dropped tensors", lambda t: f"{t['dropped_tensors']:,}"),
        ("source", lambda t: size(t["source_bytes"])),
        ("output", lambda t: size(t["output_bytes"])),
    ]
    return [
        ("", *(name for name, _ in builds)),
        ("scales", *(manifest["options"]["scale_dtype"] for _, manifest in builds)),
        *((label, *map(show, totals)) for label, show in lines),
    ]


def scale_note(manifest: Mapping[str, Any]) -> str:
    """What the choice of scale dtype means for the reader."""
    return {
        "bfloat16": "Levels are exactly the trained ones; steps are rounded to bfloat16, as vLLM "
        "and transformers\nround them anyway. --scale-dtype float32 keeps every value for readers "
        "that multiply in float32.",
        "float16": "Levels are exactly the trained ones; readers that multiply in float32 get the "
        "share above,\nvLLM and transformers round the steps to bfloat16.",
        "float32": "Every value comes back bit for bit in readers that multiply in float32; vLLM "
        "and transformers\nround the steps to bfloat16.",
    }[manifest["options"]["scale_dtype"]] + f"\n(identical: decoded as {manifest['decode']})"
