"""Thresholds such as identical=1.0 that a build has to reach."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from .findings import Finding, error
from .report import Report
from .tally import Tally, share

AT_LEAST: Mapping[str, Callable[[Tally], float | None]] = {
    "identical": lambda t: share(t.identical + t.negative_zeros, t.values),
    "cast": lambda t: share(t.cast + t.negative_zeros, t.values),
    "unrounded": lambda t: share(t.unrounded, t.values),
    "levels": lambda t: share(t.compared - t.levels_differ, t.compared),
    "on_level": lambda t: share(t.on_level, t.nonzero_groups),
}
"""Shares in 0..1 that have to be at least the threshold; zeros may lose their sign."""

AT_MOST: Mapping[str, Callable[[Tally], float | None]] = {
    "relative_error": lambda t: t.relative_error,
    "largest_error": lambda t: t.largest,
}
"""Errors that have to be at most the threshold."""


@dataclass(frozen=True, slots=True)
class Threshold:
    """One requirement, by the name of its figure."""

    name: str
    value: float

    @classmethod
    def parse(cls, text: str) -> Threshold:
        """From `identical=0.99`. Raises ValueError with a sentence for the user."""
        name, _, number = text.partition("=")
        if name not in AT_LEAST and name not in AT_MOST:
            known = ", ".join([*AT_LEAST, *AT_MOST])
            raise ValueError(f"{text!r}: no figure {name!r}; there are {known}.")
        try:
            value = float(number)
        except ValueError:
            raise ValueError(f"{text!r}: write a number after {name}=, such as 0.99.") from None
        if not 0 <= value <= 1:
            raise ValueError(f"{text!r}: shares and errors lie in 0..1.")
        return cls(name, value)


def unmet(report: Report, thresholds: Iterable[Threshold]) -> list[Finding]:
    """An error for each threshold that a build misses, or that could not be measured."""
    found = []
    for wanted in thresholds:
        least = wanted.name in AT_LEAST
        figure = {**AT_LEAST, **AT_MOST}[wanted.name](report.total) if report.tensors else None
        met = figure is not None and (figure >= wanted.value if least else figure <= wanted.value)
        if not met:
            said = "was not measured" if figure is None else f"is {figure:.6g}"
            bound = "at least" if least else "at most"
            what = f"{wanted.name} {said}, required is {bound} {wanted.value:g}"
            found.append(error("required", report.name, what))
    return found
