"""Whether a build may be measured against a reference: made from it, and with scales that count.

Every value of a build is compared by the part `grid` alone; without it a few rows are, and the
record of a build of ours says the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..checkpoint.errors import CheckpointError
from ..checkpoint.folder import Checkpoint
from ..checkpoint.manifest import MANIFEST_FORMAT, MANIFEST_NAME, read_manifest
from ..verify.report import Report
from ..verify.verdict import Verdict

Hashes = Callable[[], Mapping[str, str]]


def faults(report: Report, name: str, reference: Checkpoint, hashes: Hashes) -> Iterator[str]:
    """Why a build should not be measured against the reference `name`, a sentence each.

    `hashes`: the sha256 of the reference's files, by name; called only where a build of ours, not
    compared whole, recorded the like.
    """
    copied = report.copied
    if copied is not None and copied.differ:
        whole = len(copied.differ) + len(copied.identical)
        yield (
            f"{report.name}: is no build of {name}: {len(copied.differ)} of {whole} copied "
            f"tensors differ ({copied.differ[0]}); give its own reference"
        )
    for finding in report.findings:
        if finding.code == "scale-not-finite":
            yield f"{report.name}: cannot be measured: {finding.what}; {finding.do}"
            break
    if report.sample is not None and (file := _other_source(report, reference, hashes)):
        yield (
            f"{report.name}: is no build of {name}: its {MANIFEST_NAME} names another sha256 of "
            f"{file}; give the reference it was made from"
        )


def doubt(report: Report) -> str | None:
    """What speaks against a build that is measured all the same.

    None for a sound one, and for one that others rounded anew: a build of ours never is.
    """
    verdict, known = report.judgement.verdict, [Verdict.UNPACKED]
    if not _recorded(report):
        known.append(Verdict.REROUNDED)
    if report.judgement.good or verdict in known:
        return None
    return f"{report.name}: {report.judgement.text}"


def _other_source(report: Report, reference: Checkpoint, hashes: Hashes) -> str | None:
    """A weights file of the reference whose sha256 the build's manifest gives otherwise."""
    recorded = _recorded(report)
    names = [h.path.name for h in reference.files if h.path.name in recorded]
    if not names:
        return None
    own = hashes()
    return next((name for name in names if own[name] != recorded[name]), None)


def _recorded(report: Report) -> dict[str, str]:
    """Source file -> sha256 as in the build's manifest; {} where it has none that can be read."""
    try:
        manifest = read_manifest(report.build.folder)
    except CheckpointError:
        return {}
    source: Any = manifest.get("source")
    files: Any = source.get("files") if isinstance(source, Mapping) else None
    if manifest.get("format") != MANIFEST_FORMAT or not isinstance(files, list):
        return {}
    records = [(f.get("name"), f.get("sha256")) for f in files if isinstance(f, Mapping)]
    return {n: s for n, s in records if isinstance(n, str) and isinstance(s, str)}
