"""What comparing a build with its reference yields: sums that add up over blocks and tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

LEVELS = 8
BETWEEN = 9
"""Entry of `peak_levels` for a peak on no whole level 1..8 of the stored step."""


@dataclass(frozen=True)
class Tally:
    """Counts of values and groups, and sums of squares; add two to get both together.

    A value is decoded as bf16(f32(scale) * level). `groups` are the build's, of the size its
    config states; `compared` and all that is said of levels counts groups of 32.
    """

    values: int = 0
    identical: int = 0
    """Values that decode to the reference's bits."""
    negative_zeros: int = 0
    """Zeros that decode to the zero of the other sign: equal, but 4 bits have no sign of zero."""
    unrounded: int = 0
    """Values that scale * level equals even before it is rounded to bf16."""
    cast: int = 0
    """As `identical`, for readers that round the scale to bf16 first (transformers, vLLM)."""
    groups: int = 0
    zero_groups: int = 0
    """Groups whose reference is all zero; the peak figures leave them out."""
    max_7_5: int = 0
    """Groups whose scale is the reference's largest magnitude / 7.5, within one bf16 ulp."""
    peak_levels: tuple[int, ...] = (0,) * 10
    """Groups by the level of their stored step on which the reference's largest magnitude falls,
    1..8; entry 0 is `zero_groups` again, entry 9 (`BETWEEN`) falls on no level."""
    negative_scales: int = 0
    zero_scales: int = 0
    non_finite_scales: int = 0
    reference_non_finite: int = 0
    compared: int = 0
    """Groups of the reference that certify (or are zero), whose levels were compared."""
    uncertified: int = 0
    """Groups of the reference that are on no positive 4-bit grid."""
    levels_differ: int = 0
    """Certified groups whose levels are not the trained ones, nor a multiple of them."""
    step_off: int = 0
    """Groups with the trained levels whose values do not all come back, and whose scale is over
    1.5 ulps from the trained step; ulps of the narrowest dtype that holds the scale, none of
    float32."""
    rounded_steps: int = 0
    """Groups whose values do not all come back because their float32 scale holds a number of a
    16-bit dtype."""
    error: float = 0.0
    """Sum of (decoded - reference)^2."""
    norm: float = 0.0
    """Sum of reference^2."""
    largest: float = 0.0
    """Largest |decoded - reference| / |reference| of a value; where the reference is 0, relative
    to the largest in its group, and 1 where that is 0 too."""

    def __add__(self, other: Tally) -> Tally:
        sums = {
            f.name: getattr(self, f.name) + getattr(other, f.name)
            for f in fields(self)
            if f.name not in ("peak_levels", "largest")
        }
        peaks = tuple(a + b for a, b in zip(self.peak_levels, other.peak_levels, strict=True))
        return Tally(**sums, peak_levels=peaks, largest=max(self.largest, other.largest))

    @property
    def exact(self) -> bool:
        """Every value comes back; zeros may lose their sign."""
        return self.identical + self.negative_zeros == self.values

    @property
    def wrong(self) -> int:
        """Groups of the trained grid that the build does not hold as trained."""
        return self.levels_differ + self.step_off

    @property
    def on_level(self) -> int:
        """Groups whose peak falls on a whole level of the stored step."""
        return sum(self.peak_levels[1:BETWEEN])

    @property
    def nonzero_groups(self) -> int:
        """Groups that the peak figures speak of."""
        return self.groups - self.zero_groups

    @property
    def relative_error(self) -> float | None:
        """Frobenius norm of the error over that of the reference; None where that is 0."""
        if self.norm:
            return math.sqrt(self.error / self.norm)
        return 0.0 if self.error == 0 else None

    def to_json(self) -> dict[str, Any]:
        """As in verify_report.json: counts, errors to six digits, shares in 0..1 or null."""
        counts = {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if f.name not in ("error", "norm", "largest", "peak_levels")
        }
        return {
            **counts,
            "peak_levels": list(self.peak_levels),
            "relative_error": _digits(self.relative_error),
            "largest_error": _digits(self.largest),
            "identical_share": share(self.identical, self.values),
            "unrounded_share": share(self.unrounded, self.values),
            "cast_share": share(self.cast, self.values),
            "levels_share": share(self.compared - self.levels_differ, self.compared),
            "max_7_5_share": share(self.max_7_5, self.nonzero_groups),
            "on_level_share": share(self.on_level, self.nonzero_groups),
        }


def share(part: int, whole: int) -> float | None:
    """part / whole, None of nothing."""
    return part / whole if whole else None


def _digits(value: float | None) -> float | None:
    """Six significant digits: the order of summation shows below that."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")
