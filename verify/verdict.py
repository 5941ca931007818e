"""One sentence about a build, from what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ..checkpoint.units import percent, share
from ..repack.packing import GROUP
from .copied import Copied
from .fidelity import Fidelity
from .findings import Finding, Severity
from .tally import Tally

FEW = 0.1
"""Up to this share of groups, other levels are damage to the trained grid; beyond it the build
was rounded anew."""


UNLIKE = 0.5
"""A relative error beyond this comes from no rounding to 4 bits."""


class Verdict(StrEnum):
    """What a build is, measured against its reference."""

    EXACT = "exact"
    TRAINED = "trained grid"
    REROUNDED = "re-rounded"
    FOREIGN = "not derived"
    DAMAGED = "damaged"
    UNPACKED = "not packed"
    UNCOMPARED = "not compared"
    """Conformance only: no reference was given."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """The verdict and its sentence. `good`: the build holds the trained model."""

    verdict: Verdict
    text: str
    errors: int = 0
    """Errors of the folder that the values know nothing of."""

    @property
    def good(self) -> bool:
        """Whether nothing speaks against the build."""
        sound = self.verdict in (Verdict.EXACT, Verdict.TRAINED, Verdict.UNCOMPARED)
        return sound and not self.errors

    def but(self, errors: int) -> Judgement:
        """The same on a folder with so many errors: good values do not make it a good build."""
        if not errors or not self.good:
            return self
        said = f"{errors} error{'s' * (errors != 1)} in the folder"
        return Judgement(self.verdict, f"{self.text}, but {said}", errors)

    def to_json(self) -> dict[str, Any]:
        """As in verify_report.json."""
        return {"kind": self.verdict.value, "text": self.text, "good": self.good}


DAMAGE = frozenset(
    {"files", "packed-missing", "packed-shape", "reference-shape", "reference-missing",
     "copied-missing", "claim-differs", "scale-not-finite", "name-twice"}
)  # fmt: skip
"""Codes of findings that make a build damaged whatever its values say."""


def damaged(text: str) -> Judgement:
    """A build whose files cannot even be compared."""
    return Judgement(Verdict.DAMAGED, f"damaged: {text.rstrip('.')}")


def judge(
    total: Tally,
    tensors: Sequence[Fidelity],
    copied: Copied | None,
    findings: Sequence[Finding],
    *,
    partly: bool = False,
) -> Judgement:
    """The verdict on a build that was compared with its reference."""
    if copied is not None and copied.foreign:
        return _foreign(copied)
    broken = [f for f in findings if f.severity is Severity.ERROR and f.code in DAMAGE]
    if not tensors:
        if broken:
            return damaged(_first(broken))
        return Judgement(Verdict.UNPACKED, "not packed: no packed tensor was compared")
    if not broken and (rounded := _rerounded(total, tensors)):
        return Judgement(Verdict.REROUNDED, rounded)
    if broken:
        return damaged(_first(broken))
    if copied is not None and copied.differ:
        differ, count = len(copied.differ), len(copied.differ) + len(copied.identical)
        return damaged(f"{differ} of {count} copied tensors differ ({copied.differ[0]})")
    if fault := _wrong_groups(total, tensors):
        return damaged(fault)
    return _good(total, tensors, " in the part compared" if partly else "")


def _first(broken: Sequence[Finding]) -> str:
    more = f", and {len(broken) - 1} more" if len(broken) > 1 else ""
    return f"{broken[0].where}: {broken[0].what}{more}"


def _foreign(copied: Copied) -> Judgement:
    text = f"{copied.text_differ} of {copied.text} copied text tensors differ"
    return Judgement(Verdict.FOREIGN, f"not derived from this reference: {text}")


def _rerounded(total: Tally, tensors: Sequence[Fidelity]) -> str | None:
    """How the build was rounded anew, or None."""
    if total.exact:
        return None
    error = f"relative error {percent(total.relative_error)}"
    reference = total.compared + total.uncertified
    if total.max_7_5 * 2 > total.nonzero_groups:
        shared = share(total.max_7_5, total.nonzero_groups)
        return f"re-rounded: steps are max/7.5 in {shared} of groups, {error}"
    if total.uncertified > FEW * reference:
        shared = share(total.uncertified, reference)
        return f"re-rounded: {shared} of the reference's groups are on no 4-bit grid, {error}"
    if (total.relative_error or 0) > UNLIKE:
        return None
    if regrouped := [t for t in tensors if not t.tally.exact and not t.tally.compared]:
        of = f"{len(regrouped)} of {len(tensors)} packed tensors"
        return f"re-rounded: {of} have other groups than the trained ones of 32, {error}"
    if total.wrong > FEW * total.compared:
        shared = share(total.wrong, total.compared)
        what = f"levels or steps are not the trained ones in {shared} of groups"
        if not total.levels_differ:
            what = f"levels are the trained ones, steps are not in {shared} of groups"
        return f"re-rounded: {what}, {error}"
    return None


def _wrong_groups(total: Tally, tensors: Sequence[Fidelity]) -> str | None:
    """Where the trained grid is damaged, or None."""
    if total.exact:
        return None
    counts = [
        (total.non_finite_scales, "hold a scale that is not finite"),
        (total.levels_differ, "hold other levels than the trained ones"),
        (total.step_off, "hold a wrong scale"),
    ]
    first = next((t for t in tensors if t.first_wrong), None)
    if first is None or first.first_wrong is None:
        error = total.relative_error or 0
        return f"relative error {percent(error)}" if error > UNLIKE else None
    row, group = first.first_wrong
    where = f"first in {first.module}, row {row}, group {group}"
    said = [f"{n:,} {what}" for n, what in counts if n]
    return f"of {total.groups:,} groups {' and '.join(said)} ({where})"


def _good(total: Tally, tensors: Sequence[Fidelity], where: str) -> Judgement:
    if total.exact:
        zeros = f" ({total.negative_zeros:,} zeros lost their sign)" if total.negative_zeros else ""
        return Judgement(Verdict.EXACT, f"exact: {_certified(total, tensors)}{where}{zeros}")
    dtypes = " and ".join(sorted({t.scale_dtype for t in tensors}))
    if total.rounded_steps:
        dtypes = "16-bit" if dtypes == "float32" else f"{dtypes} (some of them 16-bit)"
    shared = share(total.identical, total.values)
    levels = "levels all exact"
    if total.uncertified:
        levels = f"levels exact but for {total.uncertified:,} groups that are on no grid"
    text = f"the trained grid at {dtypes} steps: {levels}, {shared} identical{where}"
    return Judgement(Verdict.TRAINED, text)


def _certified(total: Tally, tensors: Sequence[Fidelity]) -> str:
    """What was certified of a build whose every value is identical."""
    sizes = sorted({t.group_size for t in tensors} - {GROUP})
    if not sizes and not total.uncertified:
        return "every group certified, 100 % identical"
    said = "100 % identical"
    if sizes:
        said += f", in groups of {' and '.join(map(str, sizes))} instead of the trained {GROUP}"
    if total.uncertified:
        said += f", {total.uncertified:,} groups of the reference on no positive 4-bit grid"
    return said


def claims(total: Tally, manifest: Mapping[str, Any]) -> list[tuple[str, int, int]]:
    """What a manifest claims and the comparison contradicts: (figure, claimed, measured)."""
    stated = manifest.get("totals")
    if not isinstance(stated, Mapping):
        return []
    measured = {"identical": total.identical, "values": total.values, "groups": total.groups}
    return [
        (name, stated[name], value)
        for name, value in measured.items()
        if isinstance(stated.get(name), int) and stated[name] != value
    ]
