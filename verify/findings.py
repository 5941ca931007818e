"""What a check has to say: how bad, where, what, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum


class Severity(StrEnum):
    """How bad a finding is."""

    ERROR = "error"
    """Wrong values, or a reader that fails or loads something else."""
    WARNING = "warning"
    """Odd or incomplete, and harmless to the values."""
    NOTE = "note"
    """A known limit of some reader."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding; `code` is stable and short, the rest is for people.

    - `where`: file, tensor or config key.
    - `what`: what was found and what was expected.
    - `do`: what to do next, as an imperative; empty where nothing has to be done.
    """

    severity: Severity
    code: str
    where: str
    what: str
    do: str = ""

    def to_json(self) -> dict[str, str]:
        """As in verify_report.json."""
        return {**asdict(self), "severity": self.severity.value}

    def __str__(self) -> str:
        advice = f"; {self.do}" if self.do else ""
        return f"{self.where}: {self.what}{advice}."


def error(code: str, where: str, what: str, do: str = "") -> Finding:
    """A finding of kind error."""
    return Finding(Severity.ERROR, code, where, what, do)


def warning(code: str, where: str, what: str, do: str = "") -> Finding:
    """A finding of kind warning."""
    return Finding(Severity.WARNING, code, where, what, do)


def note(code: str, where: str, what: str, do: str = "") -> Finding:
    """A finding of kind note."""
    return Finding(Severity.NOTE, code, where, what, do)


def listed(names: Iterable[str], *, most: int = 3) -> str:
    """Some names in a sentence: `a, b, c and 4 more`."""
    names = sorted(names)
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
