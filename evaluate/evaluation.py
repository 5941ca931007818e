"""The result of an evaluation, and its JSON form (docs/evaluate.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ..card.files import EVALUATION_FORMAT, EVALUATION_NAME
from ..checkpoint.output import write_json
from ..verify.report import Report
from .machine import Machine
from .outputs import unwritable, write_all
from .subjects import Subject


@dataclass(frozen=True)
class Outcome:
    """What was measured of one model; None or empty for a part that did not run."""

    subject: Subject
    sha256: Mapping[str, str] | None = None
    weight_bytes: int | None = None
    grid: Mapping[str, Any] | None = None
    divergence: Mapping[str, Any] | None = None
    greedy: Mapping[str, Any] | None = None
    speed: Sequence[Mapping[str, Any]] = ()

    def origin(self) -> dict[str, Any]:
        """What it is: name, Hub id, commit, files."""
        return {**self.subject.origin(), "sha256": self.sha256}

    def to_json(self) -> dict[str, Any]:
        """One of `builds`."""
        return {
            **self.origin(),
            "scale_dtypes": self.subject.scale_dtypes,
            "disk_bytes": self.subject.disk_bytes,
            "weight_bytes": self.weight_bytes,
            "grid": self.grid,
            "divergence": self.divergence,
            "greedy": self.greedy,
            "speed": list(self.speed),
        }


@dataclass(frozen=True)
class Caution:
    """What a reader of the figures has to know; `build` is its name, None where all are meant."""

    text: str
    build: str | None = None


@dataclass(frozen=True)
class Evaluation:
    """Everything that was measured, and by which conventions."""

    parts: tuple[str, ...]
    conventions: Mapping[str, Any]
    machine: Machine
    reference: Outcome
    self_check: Mapping[str, Any] | None
    builds: tuple[Outcome, ...]
    comparisons: tuple[Mapping[str, Any], ...]
    cautions: tuple[Caution, ...]

    @property
    def warnings(self) -> list[str]:
        """The sentences of all cautions."""
        return self._warnings(None)

    def _warnings(self, only: str | None) -> list[str]:
        return [c.text for c in self.cautions if None in (only, c.build) or c.build == only]

    @property
    def repeatable(self) -> bool:
        """Whether the reference has no divergence from itself; true where that was not asked."""
        return self.self_check is None or self.self_check["max"] == 0

    def to_json(self, *, only: str | None = None) -> dict[str, Any]:
        """The schema of docs/evaluate.md; `only` one build, by name, with its warnings and
        no comparison."""
        builds = [b for b in self.builds if only in (None, b.subject.name)]
        return {
            "format": EVALUATION_FORMAT,
            "tool": {"name": "qatpack", "version": version("qatpack")},
            "parts": list(self.parts),
            "reference": self.reference.origin(),
            "conventions": dict(self.conventions),
            "machine": self.machine.to_json(),
            "reference_results": self._reference_results(),
            "builds": [build.to_json() for build in builds],
            "comparisons": [] if only is not None else list(self.comparisons),
            "warnings": self._warnings(only),
        }

    def _reference_results(self) -> dict[str, Any]:
        outcome = self.reference
        measured = next((b.divergence for b in self.builds if b.divergence), None)
        return {
            "dtype": outcome.subject.dtype.name,
            "disk_bytes": outcome.subject.disk_bytes,
            "weight_bytes": outcome.weight_bytes,
            "perplexity": measured and measured["reference_perplexity"],
            "self_check": self.self_check,
            "greedy": outcome.greedy,
            "speed": list(outcome.speed),
        }


def write_evaluation(value: Mapping[str, Any], path: Path) -> Path:
    """Write the JSON form to a file, and return it. Raises `OutputError` where that fails."""
    try:
        write_json(path, value)
    except OSError as error:
        raise unwritable(path, error) from error
    return path


def write_evaluations(evaluation: Evaluation) -> list[Path]:
    """Write evaluation.json into every build's folder; returns the paths.

    Raises `OutputError`, after the others were written, where one cannot be.
    """
    return write_all(
        partial(
            write_evaluation,
            evaluation.to_json(only=build.subject.name),
            build.subject.source.folder / EVALUATION_NAME,
        )
        for build in evaluation.builds
    )


def grid_of(report: Report) -> dict[str, Any]:
    """verify's figures, as far as they come along."""
    total = report.total.to_json()
    names = ("relative_error", "identical", "values", "identical_share", "levels_share",
             "peak_levels")  # fmt: skip
    return {**{n: total[n] for n in names}, "verdict": report.judgement.to_json()}
