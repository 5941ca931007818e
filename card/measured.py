"""The figures of the result files as Markdown, with the conventions they were measured by."""

from __future__ import annotations

from collections.abc import Iterator

from ..checkpoint.manifest import MANIFEST_NAME
from ..checkpoint.units import percent, share, size
from .build import Build
from .evaluation import Evaluation, Speed
from .files import EVALUATION_NAME, VERIFY_NAME
from .markdown import plain, table
from .results import Results
from .verification import Verification


def measured(results: Results) -> Iterator[str]:
    """Paragraphs: what the repack counted, then each later measurement there is."""
    yield "### By the repack"
    yield _repacked(results.build)
    if results.verification is not None:
        yield "### By verification"
        yield from _verified(results.verification)
    if results.evaluation is not None:
        yield "### By evaluation"
        yield from _evaluated(results.evaluation)
    yield from (f"![{_caption(name)}]({name})" for name in results.plots)


def _caption(name: str) -> str:
    """What a picture shows, from its file name."""
    return plain(name.rpartition("/")[2].removesuffix(".png").replace("-", " ").replace("_", " "))


def _repacked(build: Build) -> str:
    totals = build.totals
    rows = [
        ("", MANIFEST_NAME),
        ("packed tensors", f"{totals['packed_tensors']:,}"),
        ("packed modules", f"{totals['packed_modules']:,}"),
        ("groups of 32", f"{totals['groups']:,}"),
        ("groups certified", share(totals["certified"] + totals["zero"], totals["groups"])),
        ("stored scales", build.scale_dtype),
        ("values identical to the source", share(totals["identical"], totals["values"])),
        ("zeros that lost their sign", f"{totals['negative_zeros']:,}"),
        ("copied unchanged", _tensors(totals["copied_tensors"], totals["copied_bytes"])),
        ("dropped", _tensors(totals["dropped_tensors"], totals["dropped_bytes"])),
        ("tensor bytes, source", size(totals["source_bytes"])),
        ("tensor bytes, here", size(totals["output_bytes"])),
    ]
    return f"{table(rows)}\n\nIdentical: the same bits when decoded as {plain(build.decode)}."


def _tensors(count: int, nbytes: int) -> str:
    return f"{count:,} tensors, {size(nbytes)}"


def _verified(found: Verification) -> Iterator[str]:
    """The verdict first, also where it is a bad one."""
    if not found.passed:
        yield "**This build did not pass its verification.**"
    yield f"Verdict of qatpack {found.version}: {plain(found.verdict)}."
    if found.counts is not None:
        yield table(list(_comparison(found)))
        yield (
            f"Identical: the same bits when decoded as {plain(found.decode or '')}. Relative "
            "error: Frobenius norm of the difference over that of the reference."
        )
    if found.errors:
        yield "\n".join(f"- error: {plain(said)}" for said in found.errors)
    lines = [f"- checked: {plain(said)}" for said in found.checks]
    lines += [f"- proven: {plain(said)}" for said in found.proven]
    lines += [f"- not proven: {plain(said)}" for said in found.unproven]
    if lines:
        yield "\n".join(lines)


def _comparison(found: Verification) -> Iterator[tuple[str, str]]:
    counts = found.counts or {}
    values, compared = counts["values"], counts["compared"]
    yield "", VERIFY_NAME
    yield "packed tensors compared", f"{counts['tensors']:,}"
    yield "relative error", percent(found.relative_error)
    yield "largest relative error of a value", percent(found.largest_error)
    yield "values identical", share(counts["identical"], values)
    yield "identical before rounding to bf16", share(counts["unrounded"], values)
    yield "identical with scales cast to bf16", share(counts["cast"], values)
    yield "groups with the trained levels", share(compared - counts["levels_differ"], compared)
    yield (
        "groups re-rounded with step max/7.5",
        share(counts["max_7_5"], counts["groups"] - counts["zero_groups"]),
    )
    if found.copied is not None:
        identical, others = found.copied
        yield "other tensors, byte for byte", f"{identical:,} of {identical + others:,}"


def _evaluated(found: Evaluation) -> Iterator[str]:
    rows = [("", EVALUATION_NAME), *_fidelity(found)]
    if len(rows) > 1:
        yield table(rows)
        yield _conventions(found)
    if found.speed:
        yield table([_SPEED_HEAD, *map(_speed_row, found.speed)])
        yield _speed_conventions(found)


def _fidelity(found: Evaluation) -> Iterator[tuple[str, str]]:
    d, greedy = found.divergence, found.greedy
    if d is not None:
        yield "mean KL", f"{d.mean:.5g} ± {d.standard_error:.2g} nats"
        yield "median, 99 %, largest KL", f"{d.median:.3g}, {d.p99:.3g}, {d.max:.3g} nats"
        same = share(d.same_top, 1).removesuffix(" %")
        yield "same top token", f"{same} ± {100 * d.same_top_se:.3f} %"
        yield "perplexity", f"{d.perplexity:.5g} (reference {d.reference_perplexity:.5g})"
        yield "perplexity ratio", f"{d.perplexity_ratio:.4f} ± {d.perplexity_ratio_se:.4f}"
    if greedy is not None:
        yield (
            "greedy tokens equal before the first difference",
            f"{greedy.equal_before:,} of {greedy.tokens:,} "
            f"(the reference again: {greedy.floor_equal_before:,})",
        )


def device(found: Evaluation) -> str:
    """What it ran on."""
    chip = plain(f"{found.device} ({found.platform})")
    count = f"{found.devices} x " if found.devices != 1 else ""
    host = f", {plain(found.cpu)}" if found.cpu and found.platform == "cpu" else ""
    return f"{count}{chip}{host}, JAX {found.jax}, qatpack {found.version}"


def _conventions(found: Evaluation) -> str:
    how = found.conventions
    revision = f" at {how.text_revision}" if how.text_revision else ""
    framed = ", framed as a model's turn" if how.chat else ""
    return (
        f"{plain(how.direction)} in {plain(how.unit)}, {plain(how.arithmetic)} log-softmax, mean "
        f"over {how.positions:,} positions; ± is the standard error. Text: {plain(how.text)}"
        f"{revision} (sha256 {how.text_sha256[:16]}...), {plain(how.protocol)}, {how.windows:,} "
        f"windows of {how.length:,} tokens with BOS{framed}. Activations and dense weights "
        f"{plain(how.dtype)}, decode {plain(how.decode)}. Device: {device(found)}."
    )


_SPEED_HEAD = ("batch", "tokens/s", "reference", "ratio", "prefill", "first token")


def _speed_row(speed: Speed) -> tuple[str, ...]:
    return (
        f"{speed.batch:,}",
        f"{speed.median:.1f} ({speed.lowest:.1f}..{speed.highest:.1f})",
        "-" if speed.reference is None else f"{speed.reference:.1f}",
        "-" if speed.ratio is None else f"{speed.ratio:.3f}",
        f"{speed.prefill_ms:.1f} ms",
        f"{speed.ttft_ms:.1f} ms",
    )


def _speed_conventions(found: Evaluation) -> str:
    how = found.conventions
    tokens = "" if how.new_tokens is None else f", {how.new_tokens:,} new tokens"
    repeats = "" if how.repeats is None else f", {how.repeats:,} timed runs a visit"
    order = "" if how.order is None else f", order {plain(how.order)}"
    decode = "" if how.speed_decode is None else f", decode {plain(how.speed_decode)}"
    return (
        "Steady decoding in qatpack's own decoder, tokens/s of all rows together, median "
        f"(lowest..highest); prefill and first token apart{tokens}{repeats}{order}{decode}. "
        f"Device: {device(found)}."
    )
