"""What verify_report.json says, and whether it speaks of this build."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..checkpoint.manifest import MANIFEST_NAME
from .build import VERSION, Build
from .fields import FieldError, Fields
from .files import VERIFY_FORMAT

_COUNTS = (
    "tensors", "values", "identical", "unrounded", "cast", "groups", "compared", "levels_differ",
    "max_7_5", "zero_groups",
)  # fmt: skip
_PARTS = (
    ("identical", "values"), ("unrounded", "values"), ("cast", "values"), ("compared", "groups"),
    ("levels_differ", "compared"), ("max_7_5", "groups"), ("zero_groups", "groups"),
)  # fmt: skip
"""Counts and what they are counted of."""


@dataclass(frozen=True)
class Verification:
    """The figures of one report. Without a comparison `counts` is None, and the errors too.

    - `counts`: the sums over all packed tensors, by the names of docs/verify.md.
    - `copied`: tensors identical, and those that differ or are missing.
    - `errors`, `notes`: the findings of that kind, as sentences.
    """

    version: str
    verdict: str
    passed: bool
    decode: str | None
    counts: Mapping[str, int] | None
    relative_error: float | None
    largest_error: float | None
    copied: tuple[int, int] | None
    errors: tuple[str, ...]
    notes: tuple[str, ...]
    checks: tuple[str, ...]
    proven: tuple[str, ...]
    unproven: tuple[str, ...]


def read_verification(report: Mapping[str, Any], build: Build, digest: str) -> Verification:
    """The figures of a report made of `build`, whose manifest has the sha256 `digest`.

    Raises `FieldError` for a report of another build, of part of one, or a damaged one.
    """
    fields = Fields(report)
    if fields.text("format") != VERIFY_FORMAT:
        raise FieldError(f"format is not {VERIFY_FORMAT}")
    if not fields.flag("complete"):
        raise FieldError("it looked at a sample only")
    _check_build(fields, build, digest)
    found = [_finding(item) for item in fields["findings"].items()]
    fidelity = fields["fidelity"] if fields.has("fidelity") else None
    total = fidelity["total"] if fidelity else None
    proof = fields["provenance"] if fields.has("provenance") else None
    return Verification(
        version=fields["tool"].text("version", VERSION),
        verdict=fields["verdict"].text("text"),
        passed=fields.flag("passed"),
        decode=fidelity.text("decode") if fidelity else None,
        counts=_counts(total) if total else None,
        relative_error=total.number_or_none("relative_error") if total else None,
        largest_error=total.number_or_none("largest_error") if total else None,
        copied=_copied(fields["copied"]) if fields.has("copied") else None,
        errors=tuple(said for severity, said in found if severity == "error"),
        notes=tuple(said for severity, said in found if severity == "note"),
        checks=fields.texts("checks"),
        proven=proof.texts("proven") if proof else (),
        unproven=proof.texts("unproven") if proof else (),
    )


def _counts(total: Fields) -> dict[str, int]:
    counts = {name: total.integer(name) for name in _COUNTS}
    for part, whole in _PARTS:
        total.part(part, counts[whole])
    return counts


def _finding(item: Fields) -> tuple[str, str]:
    return item.text("severity"), f"{item.text('where')}: {item.text('what')}"


def _copied(fields: Fields) -> tuple[int, int]:
    return fields.integer("identical"), len(fields.texts("differ")) + len(fields.texts("missing"))


def _check_build(fields: Fields, build: Build, digest: str) -> None:
    """Raise `FieldError` unless the report was made beside this manifest.

    A report that failed may have found other tensors than the manifest claims: then only the
    manifest's hash tells, which is enough.
    """
    named = fields["build"].text_or_none("manifest_sha256")
    if named is None:
        raise FieldError(f"it was made of a folder without {MANIFEST_NAME}")
    if named != digest:
        raise FieldError(f"it was made of another build: its {MANIFEST_NAME} has another sha256")
    if not fields.has("reference"):
        return
    for key, ours in (("id", build.source_id), ("commit", build.commit)):
        theirs = fields["reference"].text_or_none(key)
        if None not in (theirs, ours) and theirs != ours:
            raise FieldError(f"it was held against the {key} {theirs}, the source's is {ours}")
