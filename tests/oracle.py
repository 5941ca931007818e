"""The grid decided by exact fractions: slow, short and independent of the code under test.

A value of magnitude v allows the steps s with bf16(s * level) = v, an interval with fractions as
ends; a group is on the grid when some step is allowed by every value, over all assignments of
levels. Nothing is rounded anywhere.
"""

from dataclasses import dataclass
from fractions import Fraction

INFINITE = 0x7F80


@dataclass(frozen=True)
class Interval:
    """Steps from lo to hi; `closed` says whether the ends belong to it."""

    lo: Fraction
    hi: Fraction
    closed_lo: bool
    closed_hi: bool

    @property
    def empty(self) -> bool:
        if self.lo == self.hi:
            return not (self.closed_lo and self.closed_hi)
        return self.lo > self.hi

    def __and__(self, other: "Interval") -> "Interval":
        lo, hi = max(self.lo, other.lo), min(self.hi, other.hi)
        closed_lo = all(i.closed_lo for i in (self, other) if i.lo == lo)
        closed_hi = all(i.closed_hi for i in (self, other) if i.hi == hi)
        return Interval(lo, hi, closed_lo, closed_hi)


def magnitude(bits: int) -> Fraction:
    """|value| of finite bf16 bits; 0x7f80 gives 2^128, the neighbour that rounding sees."""
    exponent, fraction = (bits >> 7) & 0xFF, bits & 0x7F
    if exponent == 0:
        return Fraction(fraction) * Fraction(2) ** -133
    return Fraction(128 + fraction) * Fraction(2) ** (exponent - 134)


def allowed(bits: int, level: int) -> Interval:
    """Steps whose product with `level` > 0 rounds to a magnitude > 0, ties to even."""
    bits &= 0x7FFF
    value = magnitude(bits)
    lo = (magnitude(bits - 1) + value) / 2 / level
    hi = (value + magnitude(bits + 1)) / 2 / level
    even = bits % 2 == 0
    return Interval(lo, hi, even, even)


def steps(group: list[int]) -> list[Interval]:
    """Every positive step that reproduces the group, as disjoint or touching intervals."""
    found = [Interval(Fraction(0), Fraction(2) ** 200, False, False)]
    for bits in sorted({b for b in group if b & 0x7FFF}):
        top = 7 if bits < 0x8000 else 8
        options = [allowed(bits, level) for level in range(1, top + 1)]
        both = [a & b for a in found for b in options]
        found = [i for i in both if not i.empty]
    return found


def verdict(group: list[int]) -> str:
    """The name of the status of 32 bf16 bit patterns."""
    if any(b & 0x7FFF >= INFINITE for b in group):
        return "NON_FINITE"
    if not any(b & 0x7FFF for b in group):
        return "ZERO"
    if steps(group):
        return "CERTIFIED"
    return "NEEDS_NEGATIVE_STEP" if steps([b ^ 0x8000 for b in group]) else "OFF_GRID"
