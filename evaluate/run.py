"""The evaluation of builds against their reference, from folders to one result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

from ..checkpoint.source import Source
from ..verify.report import Report
from . import divergence, origin, speed
from .evaluation import Caution, Evaluation, Outcome, grid_of
from .greedy import match
from .job import Bars, Divergence, Exact, Job, Options, no_bars, prepare
from .machine import Machine, read_machine
from .speed import Visit

PERPLEXED = 1000


def evaluate(
    reference: Source,
    builds: Sequence[tuple[str, Source]],
    options: Options | None = None,
    *,
    bars: Bars = no_bars,
) -> Evaluation:
    """Measure builds against the bf16 checkpoint they were made from.

    Each model is on the device alone: first all with the `exact` decode for hidden states and
    greedy answers, then heads alone for the divergences, then all with `fast` for the speed, there
    and back again.

    Args:
        reference: the bf16 checkpoint.
        builds: (name, source) of each; names are distinct.
        options: see there.
        bars: shows progress.

    Raises:
        CheckpointError: damaged files.
        ModelError: a build of another reference, one that cannot be run, a text too short, a
            tokenizer without a BOS, no room on the device.
    """
    job = prepare(reference, builds, options or Options(), bars)
    reports = job.verify()
    exact = job.run_exact()
    diverged = job.diverge(exact)
    visits = job.time_all()
    machine = read_machine(job.devices)
    outcomes = tuple(_outcomes(job, reports, exact, diverged, visits, machine))
    return Evaluation(
        parts=job.options.parts,
        conventions=conventions(job),
        machine=machine,
        reference=outcomes[0],
        self_check=diverged and diverged.itself,
        builds=outcomes[1:],
        comparisons=tuple(_comparisons(outcomes[1:], diverged)),
        cautions=tuple(_cautions(job, outcomes[1:], reports, diverged)),
    )


def conventions(job: Job) -> dict[str, Any]:
    """How everything was measured, as in evaluation.json."""
    options, windows = job.options, job.windows
    protocol, count = options.protocol, len(windows.tokens)
    letters = [chr(ord("A") + i) if i < 26 else str(i) for i in range(len(job.subjects))]
    return {
        "text": options.text.to_json(windows.text_tokens),
        "protocol": protocol.style,
        "chat": protocol.chat,
        "windows": count,
        "length": protocol.length,
        "positions": count * windows.scored,
        "targets": count * windows.targets,
        "bos": windows.bos,
        "first_ids": windows.tokens[0, :6].tolist(),
        "direction": "KL(reference || build)",
        "unit": "nats",
        "arithmetic": "float32",
        "dtype": job.dtype_of(job.subjects[0]).name,
        "fidelity_decode": "exact",
        "speed_decode": options.decode,
        "prompt": options.prompt,
        "prompt_tokens": len(job.prompt),
        "new_tokens": options.tokens,
        "seed": 0,
        "batches": list(options.batches),
        "repeats": options.repeats,
        "order": " ".join([*letters, *reversed(letters)]),
    }


def _outcomes(
    job: Job,
    reports: Sequence[Report],
    exact: Sequence[Exact],
    diverged: Divergence | None,
    visits: Sequence[Sequence[Visit]],
    machine: Machine,
) -> Iterator[Outcome]:
    """Of the reference, then of each build."""
    parts = job.options.parts
    for index, subject in enumerate(job.subjects):
        build = index - 1
        own = visits[index]
        weight_bytes = own[0].weight_bytes if own else exact[index].weight_bytes
        yield Outcome(
            subject=subject,
            sha256=job.sha256[index] if "kl" in parts else None,
            weight_bytes=weight_bytes,
            grid=grid_of(reports[build]) if index and "grid" in parts else None,
            divergence=diverged.builds[build].summary() if index and diverged else None,
            greedy=_greedy(job, exact, index) if "greedy" in parts else None,
            speed=speed.summarize(own, machine, visits[0] if index else None) if own else (),
        )


def _greedy(job: Job, exact: Sequence[Exact], index: int) -> dict[str, Any]:
    """The greedy answer of one model as in evaluation.json."""
    said, decode = exact[0].answer, job.vocabulary.decode
    assert said is not None  # the reference ran first, with the same parts
    floor = said.floor.to_json()
    if index == 0:
        return {
            "tokens": len(said.ids),
            "text": decode(said.ids),
            "ids": list(said.ids),
            "floor": floor,
        }
    ids = exact[index].ids
    return {
        **match(said.ids, said.margins, ids).to_json(),
        "text": decode(ids),
        "reference_text": decode(said.ids),
        "ids": list(ids),
        "floor": floor,
    }


def _comparisons(
    builds: Sequence[Outcome], diverged: Divergence | None
) -> Iterator[dict[str, Any]]:
    """Every pair of builds."""
    for i, j in combinations(range(len(builds)), 2):
        a, b = builds[i], builds[j]
        found: dict[str, Any] = {"a": a.subject.name, "b": b.subject.name}
        if diverged is None:
            nothing = ("a_closer", "b_closer", "equal", "mean_ratio")
            found |= dict.fromkeys(nothing)
        else:
            found |= divergence.closer(diverged.builds[i].kl, diverged.builds[j].kl)
        rates = zip(a.speed, b.speed, strict=True)
        ratios = [{"batch": x["batch"], "ratio": y["ratio"] / x["ratio"]} for x, y in rates]
        yield {**found, "speed": ratios}


def _cautions(
    job: Job, builds: Sequence[Outcome], reports: Sequence[Report], diverged: Divergence | None
) -> Iterator[Caution]:
    for report in reports:
        forced = [f"{fault} (--force)" for fault in job.faults(report)]
        doubt = origin.doubt(report)
        for said in forced or ([doubt] if doubt else []):
            yield Caution(said, report.name)
    if diverged is None:
        return
    if diverged.itself["max"]:
        yield Caution(
            f"the reference differs from a second run of itself by {diverged.itself['mean']:.2g} "
            "nats: this device does not repeat itself, and smaller divergences mean nothing"
        )
    measured = builds[0].divergence or {}
    if (perplexity := measured["reference_perplexity"]) > PERPLEXED:
        yield Caution(
            f"the reference has a perplexity of {perplexity:,.0f}: an instruct model on raw prose; "
            "read divergence and same top first, or frame the text with --chat"
        )
