"""The verification of one build, from its folder to a report."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from threading import Event
from typing import Any

from ..checkpoint.errors import CheckpointError, QatpackError
from ..checkpoint.folder import Checkpoint
from ..checkpoint.manifest import MANIFEST_NAME, read_manifest
from ..checkpoint.progress import Progress, ignore_progress
from ..checkpoint.source import Source
from ..repack.layout import Layout, read_layout, refuse_packed
from .build import Build, open_build
from .copied import (
    Copied,
    compare_copied,
    copied_bytes,
    copied_findings,
    head_findings,
    read_head,
)
from .decompressor import decoded_bytes
from .fidelity import Fidelity, compare_pairs, sampled_bytes
from .findings import Finding, Severity, error, warning
from .pairs import Pair, make_pairs, reference_modules, reference_name
from .provenance import derived_bytes, rederive
from .readers import file_findings, generation_findings, limit_findings, tensor_findings
from .report import Report
from .scales import Scales, scan_scales
from .scheme import read_scheme, size_findings
from .settings import settings_findings
from .tally import Tally
from .verdict import Judgement, Verdict, claims, damaged, judge


@dataclass(frozen=True)
class Reference:
    """The bf16 checkpoint that builds are held against."""

    source: Source
    layout: Layout


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is looked at.

    - `pattern`: only packed modules whose name matches (shell style); other tensors are then
      not compared.
    - `sample`: rows of each packed tensor instead of all, and the ends of each copied one.
    - `conformance`: whether compressed-tensors' own code is asked about the folder, which takes
      the seconds that torch needs to be imported. Left out with `pattern` or `sample`.
    - `rederive`: share of tensors to derive again from the source, which is the reference.
    - `load`: "transformers" or "vllm", to really load the folder there.
    """

    pattern: str | None = None
    sample: int | None = None
    conformance: bool = True
    rederive: float | None = None
    load: str | None = None

    @property
    def whole(self) -> bool:
        """Whether everything is compared."""
        return self.pattern is None and self.sample is None


def open_reference(source: Source) -> Reference:
    """Open the reference. Raises `CheckpointError`, also for one that is itself packed."""
    layout = read_layout(Checkpoint.open(source.folder))
    refuse_packed(layout)
    return Reference(source, layout)


def verify(
    source: Source,
    reference: Reference | None = None,
    options: Options | None = None,
    *,
    name: str | None = None,
    progress: Progress = ignore_progress,
) -> Report:
    """Hold one build against its reference and against what readers demand.

    Without a reference only the folder itself is checked. `progress` gets the bytes of each step,
    `work_bytes` in all, and is called from several threads. Whatever is wrong with the build
    becomes a finding; raises `CheckpointError` only where the reference is damaged.
    """
    name = name or source.id or source.folder.resolve().name
    options = options or Options()
    try:
        build = open_build(source.folder, name=name)
    except CheckpointError as fault:
        said = _pathless(str(fault), source)
        found = error("files", name, said, "download or export it again")
        origin = reference and reference.source
        return Report(source, name, origin, damaged(said), findings=(found,))
    report = _described(source, build, reference)
    if reference is not None:
        report = _compared(report, build, reference, options, progress)
    report = _conformed(report, build, options, progress)
    if reference is not None and options.rederive is not None:
        folder, layout = reference.source.folder, reference.layout
        proof, found = rederive(build, folder, layout, share=options.rederive, progress=progress)
        report = replace(report, provenance=proof, findings=(*report.findings, *found))
    if reference is None:
        return replace(report, judgement=_uncompared(report))
    return replace(report, judgement=report.judgement.but(report.count(Severity.ERROR)))


def _pathless(text: str, source: Source) -> str:
    """A sentence about the folder without where it stands here: reports travel with builds."""
    folder = str(source.folder)
    return text.replace(f"{folder}/", "").replace(folder, source.folder.name).rstrip(".")


def _uncompared(report: Report) -> Judgement:
    """The verdict on a folder alone."""
    broken = [f for f in report.findings if f.severity is Severity.ERROR]
    said = f"{len(broken)} error{'s' * (len(broken) != 1)}" if broken else "no error"
    text = (
        f"not compared: no reference given; {report.packed:,} packed tensors, {said} in the folder"
    )
    return Judgement(Verdict.UNCOMPARED, text)


def _conformed(report: Report, build: Build, options: Options, progress: Progress) -> Report:
    """The report with what the folder's config, files and readers say."""
    scheme, findings = read_scheme(build.checkpoint.config)
    findings += size_findings(build, scheme)
    findings += tensor_findings(build)
    folder = report.reference.folder if report.reference else None
    findings += file_findings(build, folder)
    findings += generation_findings(build)
    checks = ["headers, index and files agree", "packed, scale and shape tensors agree"]
    if options.whole and options.conformance:
        from .conform import conform

        complete = report.reference is None
        found, done = conform(build, scheme, complete=complete, progress=progress)
        findings += found
        checks += done
    if options.load is not None:
        from .load import load_in

        found, done = load_in(options.load, build)
        findings += found
        checks += done
    negative = report.total.negative_scales
    if not (report.tensors and options.whole):
        scales = scan_scales(build)
        negative = scales.negative
        findings += _scale_findings(build.name, scales)
    findings += limit_findings(build, negative_scales=negative)
    return replace(report, findings=(*report.findings, *findings), checks=tuple(checks))


def _described(source: Source, build: Build, reference: Reference | None) -> Report:
    """What the headers say and the folder's own checks find."""
    head = read_head(build)
    findings = [*build.findings, *head_findings(head, build)]
    odd = (_pathless(w, source) for w in build.checkpoint.warnings)
    findings += [warning("files", build.name, w) for w in odd]
    return Report(
        source,
        build.name,
        reference and reference.source,
        Judgement(Verdict.UNCOMPARED, ""),
        stored=len(build.checkpoint.tensors),
        packed=len(build.packed),
        stored_bytes=build.checkpoint.tensor_bytes,
        scale_dtypes=tuple(sorted({t.scale_dtype for t in build.packed.values()})),
        group_sizes=tuple(sorted({t.group_size for t in build.packed.values()})),
        head=head,
        findings=tuple(findings),
    )


def _compared(
    report: Report, build: Build, reference: Reference, options: Options, progress: Progress
) -> Report:
    pairs, findings = select(build, reference.layout, options)
    tensors, copied = _compare_all(pairs, build, reference.layout, options, progress)
    if copied is not None:
        findings += copied_findings(copied, build)
        findings += settings_findings(build, reference.layout)
    total = sum((t.tally for t in tensors), Tally())
    findings += _value_findings(build.name, total)
    findings += _scale_findings(build.name, Scales(non_finite=total.non_finite_scales))
    if options.whole:
        findings += _claim_findings(build, total)
    found = (*report.findings, *findings)
    return replace(
        report,
        judgement=judge(total, tensors, copied, found, partly=not options.whole),
        tensors=tensors,
        copied=copied,
        findings=found,
        sample=options.sample,
        pattern=options.pattern,
    )


def _compare_all(
    pairs: list[Pair], build: Build, reference: Layout, options: Options, progress: Progress
) -> tuple[list[Fidelity], Copied | None]:
    """Packed tensors, which keep the cores busy, and beside them copied ones, which wait for
    memory; None of these with a pattern."""
    if options.pattern is not None:
        return compare_pairs(pairs, sample=options.sample, progress=progress), None
    failed = Event()

    def beside(count: int) -> None:
        if failed.is_set():
            raise CancelledError
        progress(count)

    used, ends = sources(build, reference), options.sample is not None
    with ThreadPoolExecutor(1) as pool:
        copying = pool.submit(compare_copied, build, reference, used, ends=ends, progress=beside)
        try:
            tensors = compare_pairs(pairs, sample=options.sample, progress=progress)
            return tensors, copying.result()
        except BaseException:  # an interrupt, too, while the copied ones are waited for
            failed.set()
            raise


def select(build: Build, reference: Layout, options: Options) -> tuple[list[Pair], list[Finding]]:
    """The packed modules to compare. Raises `QatpackError` where the pattern matches none."""
    pairs, findings = make_pairs(build, reference, reference_modules(reference))
    pattern = options.pattern
    if pattern is None:
        return pairs, findings
    chosen = [p for p in pairs if fnmatchcase(p.tensor.module, pattern)]
    findings = [f for f in findings if fnmatchcase(f.where, pattern)]
    broken = any(fnmatchcase(module, pattern) for module in build.broken)
    if not (chosen or findings or broken):
        raise QatpackError(f"{build.name}: no packed tensor matches {pattern!r}.")
    return chosen, findings


def sources(build: Build, reference: Layout) -> set[str]:
    """Reference tensors that the build packs, decodable or not."""
    modules = reference_modules(reference)
    names = (reference_name(m, build, reference) for m in (*build.packed, *build.broken))
    return {modules[n].source.name for n in names if n in modules}


def work_bytes(source: Source, reference: Reference | None, options: Options) -> int:
    """Bytes that `verify` reports to `progress`; 0 for a build it cannot open."""
    total = 0
    try:
        build = open_build(source.folder)
        if reference is not None:
            total += _reference_bytes(build, reference.layout, options)
    except QatpackError:
        return 0
    if options.whole and options.conformance:
        total += decoded_bytes(build)
    return total


def _reference_bytes(build: Build, reference: Layout, options: Options) -> int:
    pairs, _ = select(build, reference, options)
    total = sum(sampled_bytes(p, options.sample) for p in pairs)
    if options.pattern is None:
        ends = options.sample is not None
        total += copied_bytes(reference, sources(build, reference), ends=ends)
    if options.rederive is not None:
        total += sum(derived_bytes(manifest_of(build)))
        total += int(options.rederive * reference.checkpoint.tensor_bytes)
    return total


def _value_findings(where: str, total: Tally) -> list[Finding]:
    """Values that no sound build of a QAT checkpoint has."""
    found = []
    if total.reference_non_finite:
        what = f"{total.reference_non_finite:,} groups of the reference hold NaN or infinity"
        found.append(error("reference-damaged", where, what, "download the reference again"))
    if zero := total.zero_scales - min(total.zero_scales, total.zero_groups):
        what = f"{zero:,} groups have the scale 0 although the reference is not 0 there"
        found.append(error("scale-zero", where, what, "export it again"))
    if total.rounded_steps:
        what = f"{total.rounded_steps:,} groups do not come back: their float32 scale is rounded "
        do = "repack with --scale-dtype float32 to get every value back"
        found.append(warning("scale-rounded", where, f"{what}to 16 bits", do))
    if total.uncertified:
        what = f"{total.uncertified:,} groups of the reference are on no positive 4-bit grid"
        make = warning if total.exact else error
        found.append(make("off-grid", where, what, "check that it is the QAT checkpoint"))
    return found


def _scale_findings(where: str, scales: Scales) -> list[Finding]:
    if not scales.non_finite:
        return []
    what = f"{scales.non_finite:,} scales are NaN or infinite"
    return [error("scale-not-finite", where, what, "export it again")]


def _claim_findings(build: Build, total: Tally) -> list[Finding]:
    """Where the build's own manifest says something else than was measured."""
    manifest = manifest_of(build)
    return [
        error(
            "claim-differs",
            MANIFEST_NAME,
            f"claims {name} {claimed:,}, measured {value:,}",
            "do not trust this folder; repack it",
        )
        for name, claimed, value in claims(total, manifest)
    ]


def manifest_of(build: Build) -> Mapping[str, Any]:
    """The build's manifest, {} where it has none or an unreadable one."""
    try:
        return read_manifest(build.folder)
    except CheckpointError:
        return {}
