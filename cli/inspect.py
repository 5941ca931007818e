"""`qatpack inspect`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from ..checkpoint.units import share, size
from .progress import byte_bar
from .repack import start_jax_on_cpu
from .text import print_json, table, warn

if TYPE_CHECKING:
    from ..repack.inspect import Reading


@click.command()
@click.argument("source", metavar="SRC")
@click.option("--revision", help="Branch, tag or commit of a Hub source.")
@click.option(
    "--sample",
    type=click.IntRange(min=1),
    metavar="N",
    help="Measure N rows of each tensor instead of all.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, every tensor included.")
def inspect(source: str, revision: str | None, sample: int | None, as_json: bool) -> None:
    """What checkpoint SRC is, and which of its tensors stand on a trained grid.

    SRC is a folder, or org/name on the Hub, which is downloaded into its cache first.

    Group size and axis are measured, not assumed: on a QAT checkpoint groups of 32 along the
    input dim certify, groups of 64 and the other axis do not.

    \b
    Example:
      qatpack inspect google/gemma-4-E2B-it-qat-q4_0-unquantized --sample 64
    """
    start_jax_on_cpu()
    from ..checkpoint.errors import CheckpointError
    from ..checkpoint.folder import Checkpoint
    from ..checkpoint.source import resolve_source
    from ..repack.inspect import candidates, describe, expected_output, read_grids
    from ..repack.layout import read_layout

    origin = resolve_source(source, revision=revision)
    checkpoint = Checkpoint.open(origin.folder)
    layout = read_layout(checkpoint)
    facts = describe(origin, checkpoint)
    for message in checkpoint.warnings:
        warn(message)
    packed = bool(facts["scheme"] and facts["scheme"]["packed_modules"])
    readings: list[Reading] = []
    if not packed:
        total = sum(t.nbytes for t in candidates(layout))
        with byte_bar("inspect", total) as progress:
            readings = list(read_grids(layout, sample=sample, progress=progress))
        try:
            facts["expected_output_bytes"] = expected_output(layout, readings)
        except CheckpointError as error:
            warn(f"a repack would stop: {error}")
    facts["grid"] = [reading.to_json() for reading in readings]
    if as_json:
        print_json(facts)
        return
    _print_facts(facts)
    if readings:
        click.echo("\n" + _grid_table(readings, sample))


def _print_facts(facts: Mapping[str, Any]) -> None:
    commit = f" at {facts['commit']}" if facts["commit"] else ""
    click.echo(f"{facts['id'] or facts['folder']}{commit}")
    named = facts["architectures"]
    architecture = ", ".join(map(str, named)) if isinstance(named, list) else "no architecture"
    click.echo(
        f"{architecture} ({facts['model_type']}), text decoder under {facts['text_prefix']}*"
    )
    head = facts["head"]
    stored = "not stored"
    if head["stored"]:
        stored = (
            f"stored, {'identical to' if head['identical'] else 'different from'} the embedding"
        )
    click.echo(f"lm_head: {'tied' if head['tied'] else 'untied'}, {stored}")
    if scheme := facts["scheme"]:
        _print_scheme(scheme)
    rows: list[Sequence[object]] = [("part", "tensors", "bytes")]
    rows += [(n, f"{p['tensors']:,}", size(p["bytes"])) for n, p in facts["parts"].items()]
    rows.append((f"{len(facts['files'])} file(s)", f"{facts['tensors']:,}", size(facts["bytes"])))
    click.echo("\n" + table(rows))
    if "expected_output_bytes" in facts:
        click.echo(f"\nrepacked: {size(facts['expected_output_bytes'])} with bfloat16 scales")


def _print_scheme(scheme: Mapping[str, Any]) -> None:
    if not scheme["packed_modules"]:
        click.echo("config.json carries a quantization_config although nothing is packed")
        return
    weights = scheme["weights"] or {}
    click.echo(
        f"already packed: {scheme['packed_modules']} modules, {scheme['quant_method']} "
        f"{scheme['format']}, {weights.get('num_bits')} bits, groups of "
        f"{weights.get('group_size')}, scales {', '.join(scheme['scale_dtypes'])}; "
        f"{scheme['ignored_modules']} modules ignored"
    )


def _grid_table(readings: Sequence[Reading], sample: int | None) -> str:
    """Tensors of one role and one outcome in a line."""
    groups: dict[tuple[str, str], list[Reading]] = {}
    for reading in readings:
        outcome = "" if reading.certified == 1 else ", off"
        groups.setdefault((reading.role.value, outcome), []).append(reading)
    rows: list[Sequence[object]] = [
        (
            "grid",
            "tensors",
            "groups",
            "certified",
            "of 64",
            "down",
            "bf16",
            "f16",
            "peak 8",
            "peak 7",
        )
    ]
    for (role, outcome), members in groups.items():
        counts = sum((m.counts for m in members[1:]), members[0].counts)
        rows.append(
            (
                f"{role}{outcome}",
                len(members),
                f"{counts.groups:,}",
                share(counts.certified + counts.zero, counts.groups),
                _mean([m.shares[64] for m in members if 64 in m.shares]),
                _mean([m.other_axis for m in members if m.other_axis is not None]),
                _tenths(counts.exact_bf16, counts.certified),
                _tenths(counts.exact_f16, counts.certified),
                _tenths(counts.peaks[8], counts.certified),
                _tenths(counts.peaks[7], counts.certified),
            )
        )
    measured = "all groups of text tensors" if sample is None else f"{sample} rows of each tensor"
    return (
        f"{table(rows)}\n\nmeasured: {measured}; off: not wholly on the grid.\n"
        "of 64, down: share that certifies in groups of 64, and of 32 down the rows.\n"
        "bf16, f16: share of step intervals that hold such a number (trained in float32: about "
        "42 and 97 %).\npeak: level of a group's largest magnitude; --json has the histogram of "
        "every tensor."
    )


def _tenths(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _mean(shares: Sequence[float]) -> str:
    return share(sum(shares), len(shares))
