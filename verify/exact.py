"""The figures of a comparison by definition, in numpy: for odd groups, and for the tests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..repack.packing import BF16, unpack
from .tally import BETWEEN, LEVELS, Tally

TINY = 0x2180
"""bf16 bits of 2^-60: a reference value below it counts as 0 in the largest relative error."""

ONE_ULP = 0x10100
"""Of bfloat16, in float32 bits, and room for the rounding of a division: how near a scale has to
be to max/7.5."""

STEP_ULPS = 0x18000
"""1.5 ulps of bfloat16 in float32 bits: a trained step rounded twice to bf16 (max, then max/m) is
off by at most one ulp."""

HALF_UNIT = 1.5 * 2.0**-24
"""The same of a subnormal float16."""

ON_LEVEL = 1 / 16
"""Of a level: a trained peak lies within 0.031 of a whole level of its bf16 step, one rounded to
max/7.5 half a level away."""


@dataclass(frozen=True, slots=True)
class Certified:
    """The certified grid of some groups of 32.

    `packed: uint8[groups, 16]`, `peak: uint8[groups]`, `step: f32[groups]`, `proved:
    bool[groups]` (certified, or all zero).
    """

    packed: np.ndarray
    peak: np.ndarray
    step: np.ndarray
    proved: np.ndarray


def tally_numpy(
    bits: np.ndarray, packed: np.ndarray, scale: np.ndarray, certified: Certified | None
) -> tuple[Tally, np.ndarray]:
    """Compare groups: (sums, wrong: bool[groups]).

    `bits: uint16[groups, size]` of the reference, `packed: uint8[groups, size/2]` and `scale:
    [groups]` of the build; `certified` of the same groups, None where they are not of 32. Groups
    whose scale or reference is not finite count as not identical and add no error.
    """
    step = as_float32(scale)
    levels = unpack(np.ascontiguousarray(packed).view("<i4")).astype(np.float32)
    value, magnitude = _value(bits), bits & np.uint16(0x7FFF)
    peak = magnitude.max(1)
    good = np.isfinite(step) & (peak < 0x7F80)
    with np.errstate(all="ignore"):
        product = step[:, None] * levels
        decoded = product.astype(BF16)
        cast = (step.astype(BF16).astype(np.float32)[:, None] * levels).astype(BF16)
        off = np.abs(decoded.astype(float) - value)
    same = decoded.view(np.uint16) == bits
    good_values = good[:, None] & np.isfinite(off)
    off = np.where(good_values, off, 0.0)
    zeros = (magnitude == 0) & (decoded.view(np.uint16) ^ bits == 0x8000)
    whole = (same | zeros).all(1)
    rounded = ~whole & (step.view(np.uint32) & 0x1FFF == 0) & (scale.dtype == np.float32)
    differ = far = ~good & False
    if certified is not None:
        differ = _levels_differ(levels, step, certified)
        far = step_off(step, levels, certified, scale.dtype) & ~differ & ~whole
    facts = _peak_facts(peak, step)
    tally = Tally(
        values=bits.size,
        identical=int(same.sum()),
        negative_zeros=int(zeros.sum()),
        unrounded=int((product.view(np.uint32) == bits.astype(np.uint32) << 16).sum()),
        cast=int((cast.view(np.uint16) == bits).sum()),
        groups=len(bits),
        zero_groups=int((peak == 0).sum()),
        max_7_5=int(facts[0].sum()),
        peak_levels=tuple(np.bincount(facts[1], minlength=BETWEEN + 1).tolist()),
        negative_scales=int((step < 0).sum()),
        zero_scales=int((step == 0).sum()),
        non_finite_scales=int((~np.isfinite(step)).sum()),
        reference_non_finite=int((peak >= 0x7F80).sum()),
        levels_differ=int(differ.sum()),
        step_off=int(far.sum()),
        rounded_steps=int(rounded.sum()),
        error=float((off * off).sum()),
        norm=float((np.where(good_values, value, 0.0) ** 2).sum()),
        largest=_largest(off, value, magnitude, peak),
    )
    return tally, differ | far | ~np.isfinite(step)


def as_float32(scale: np.ndarray) -> np.ndarray:
    """Stored scales as float32; NaN, also a signalling one, without a warning."""
    with np.errstate(invalid="ignore"):
        return scale.astype(np.float32)


def _value(bits: np.ndarray) -> np.ndarray:
    """bf16 bits as float64."""
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(float)


def _largest(off: np.ndarray, value: np.ndarray, magnitude: np.ndarray, peak: np.ndarray) -> float:
    relative_to = np.where(magnitude >= TINY, np.abs(value), _value(peak)[:, None])
    with np.errstate(all="ignore"):
        ratio = np.where(relative_to > 0, off / relative_to, off > 0)
    ratio = ratio[np.isfinite(ratio)]
    return float(ratio.max(initial=0.0))


def _levels_differ(levels: np.ndarray, step: np.ndarray, certified: Certified) -> np.ndarray:
    """Proved groups that store other levels than the certified ones, or a multiple of them."""
    theirs = unpack(np.ascontiguousarray(certified.packed).view("<i4")).astype(int)
    ours = levels.astype(int)
    top, trained = np.abs(ours).max(1), certified.peak.astype(int)
    signed = np.where(step < 0, -trained, trained)[:, None]
    differ = (ours * signed != theirs * top[:, None]).any(1) | ((top == 0) != (trained == 0))
    return differ & certified.proved


def step_off(
    step: np.ndarray, levels: np.ndarray, certified: Certified, dtype: np.dtype
) -> np.ndarray:
    """Proved groups whose `step: f32[groups]`, as stored in `dtype`, is not the trained one.

    Ends (step * top level) may differ by 1.5 ulps of the narrowest of bfloat16, float16 and
    float32 that holds the step; a float32 step that needs all its bits has to decode every value,
    which the caller looks at.
    """
    top, bits = np.abs(levels).max(1), step.view(np.uint32)
    with np.errstate(all="ignore"):
        ours = np.abs(step) * top.astype(np.float32)
        trained = certified.step * certified.peak.astype(np.float32)
        half = dtype == np.float16
        near = half & (np.abs(ours - trained) <= np.float32(HALF_UNIT) * top.astype(np.float32))
    apart = np.abs(ours.view(np.int32).astype(int) - trained.view(np.int32).astype(int))
    narrow = (bits & 0xFFFF == 0, bits & 0x1FFF == 0)
    far = (apart > np.select(narrow, (STEP_ULPS, STEP_ULPS >> 3), 0)) & ~near
    return far & (certified.peak > 0) & certified.proved


def _peak_facts(peak: np.ndarray, step: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Whether the scale is max/7.5, and the entry of the level histogram, of each group."""
    top, absolute = _value(peak).astype(np.float32), np.abs(step)
    with np.errstate(all="ignore"):
        target = (top / np.float32(7.5)).view(np.int32).astype(int)
        ratio = np.nan_to_num(top / absolute, nan=0.0, posinf=100.0, neginf=0.0)
    near = (peak > 0) & (np.abs(absolute.view(np.int32).astype(int) - target) <= ONE_ULP)
    level = np.rint(np.minimum(ratio, 100)).astype(int)
    whole = (np.abs(ratio - level) <= ON_LEVEL) & (level >= 1) & (level <= LEVELS)
    return near, np.where(peak > 0, np.where(whole, level, BETWEEN), 0)
