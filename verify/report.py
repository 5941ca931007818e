"""Everything that was found out about one build, and its JSON form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ..card.files import VERIFY_FORMAT, VERIFY_NAME
from ..checkpoint.hashing import hash_file
from ..checkpoint.manifest import MANIFEST_NAME
from ..checkpoint.output import write_json
from ..checkpoint.source import Source
from .copied import Copied, Head
from .fidelity import Fidelity
from .findings import Finding, Severity
from .pairs import Kind
from .provenance import Provenance
from .tally import Tally
from .verdict import Judgement

DECODE = "bf16(f32(scale) * level)"


@dataclass(frozen=True)
class Report:
    """The result of `verify`.

    - `tensors`: the packed tensors that were compared; empty without a reference.
    - `stored`: tensors in the build, `packed` of them as packed modules.
    - `checks`: the conformance checks that ran, in words, each true whatever it found.
    - `sample`, `pattern`: what was looked at, where that is not everything.
    """

    build: Source
    name: str
    reference: Source | None
    judgement: Judgement
    stored: int = 0
    packed: int = 0
    stored_bytes: int = 0
    scale_dtypes: tuple[str, ...] = ()
    group_sizes: tuple[int, ...] = ()
    head: Head | None = None
    tensors: Sequence[Fidelity] = ()
    copied: Copied | None = None
    findings: tuple[Finding, ...] = ()
    checks: tuple[str, ...] = ()
    provenance: Provenance | None = None
    sample: int | None = None
    pattern: str | None = None

    @property
    def total(self) -> Tally:
        """Over all compared tensors."""
        return sum((t.tally for t in self.tensors), Tally())

    def kinds(self) -> dict[Kind, tuple[int, Tally]]:
        """Number of tensors and their sum for each kind present."""
        found: dict[Kind, tuple[int, Tally]] = {}
        for kind in Kind:
            tallies = [t.tally for t in self.tensors if t.kind is kind]
            if tallies:
                found[kind] = len(tallies), sum(tallies, Tally())
        return found

    def count(self, severity: Severity) -> int:
        """How many findings of a kind."""
        return sum(f.severity is severity for f in self.findings)

    @property
    def loaded(self) -> tuple[str, ...]:
        """Of the checks, those by a reader that loaded the folder."""
        return tuple(c for c in self.checks if c.startswith("loaded by "))

    @property
    def passed(self) -> bool:
        """No finding of kind error, and the build holds the trained model as far as compared."""
        return self.judgement.good and not self.count(Severity.ERROR)

    def to_json(self) -> dict[str, Any]:
        """The schema documented in docs/verify.md; stable within its format."""
        compared = None
        if self.tensors:
            compared = {
                "decode": DECODE,
                "total": {"tensors": len(self.tensors), **self.total.to_json()},
                "kinds": {k.value: {"tensors": n, **t.to_json()} for k, (n, t) in
                          self.kinds().items()},
                "tensors": [t.to_json() for t in self.tensors],
            }  # fmt: skip
        return {
            "format": VERIFY_FORMAT,
            "tool": {"name": "qatpack", "version": version("qatpack")},
            "build": {
                **_origin(self.build, self.name),
                "manifest_sha256": _manifest_hash(self.build.folder),
            },
            "reference": self.reference and _origin(self.reference, self.reference.folder.name),
            "verdict": self.judgement.to_json(),
            "passed": self.passed,
            "complete": self.sample is None and self.pattern is None,
            "sample_rows": self.sample,
            "tensor_pattern": self.pattern,
            "stored": {
                "tensors": self.stored,
                "bytes": self.stored_bytes,
                "packed_modules": self.packed,
                "scale_dtypes": list(self.scale_dtypes),
                "group_sizes": list(self.group_sizes),
                "head": self.head and self.head.to_json(),
            },
            "fidelity": compared,
            "copied": self.copied and self.copied.to_json(),
            "checks": list(self.checks),
            "findings": [f.to_json() for f in self.findings],
            "provenance": self.provenance and self.provenance.to_json(),
        }


def _origin(source: Source, name: str) -> dict[str, str | None]:
    """Never the local path: the report travels with the build."""
    return {"name": name, "id": source.id, "commit": source.commit}


def _manifest_hash(folder: Path) -> str | None:
    """What ties the report to the build it was made of; None for a build without a manifest."""
    path = folder / MANIFEST_NAME
    return hash_file(path) if path.is_file() else None


def write_report(report: Report, folder: Path) -> Path:
    """Write verify_report.json into the build's folder; returns its path. Raises OutputError."""
    path = folder / VERIFY_NAME
    write_json(path, report.to_json())
    return path
