"""The certificate in plain numpy, for samples and for one refused group in words."""

from __future__ import annotations

import numpy as np

from .kernel import Status

PEAK_LEVELS = (8, 4, 7, 6, 5)
"""Levels of the largest magnitude, in the order tried; levels 1-3 are their doubles."""

TOLERANCE = 1 / 16
"""Of a level: the right peak level deviates by at most 0.052, a wrong one by at least 0.077."""


def share_certified(bits: np.ndarray, group_size: int) -> float:
    """Share of the groups of `bits: uint16[rows, in]` that lie on a grid of their own.

    Groups run along the last axis; transpose to test the other one. Groups of zeros say nothing
    and are left out (0.0 when there is nothing else). In numpy, about 0.05 GB/s: for samples.

    Raises ValueError when `in` is not a multiple of `group_size`.
    """
    if group_size < 1 or bits.shape[-1] % group_size:
        raise ValueError(f"{bits.shape[-1]} columns are no multiple of groups of {group_size}")
    groups = np.ascontiguousarray(bits).reshape(-1, group_size)
    groups = groups[(groups & 0x7FFF).any(axis=1)]
    return float(_certified(groups).mean()) if len(groups) else 0.0


def describe(bits: np.ndarray, status: Status) -> str:
    """What is wrong with one group, as the rest of a sentence that begins with where it is."""
    values = _values(bits)
    first = ", ".join(f"{v:.6g}" for v in values[:4])
    if status == Status.NON_FINITE:
        index = int(np.flatnonzero(~np.isfinite(values))[0])
        return f"holds {values[index]} at value {index}; first values {first}"
    peak = values[np.abs(values).argmax()]
    if status == Status.NEEDS_NEGATIVE_STEP:
        return (
            f"needs a negative step: its peak {peak:.6g} lies on level +8 and 4 bits hold -8..7; "
            f"first values {first}"
        )
    if status == Status.OFF_GRID:
        return f"is on no 4-bit grid: peak {peak:.6g}, {_obstacle(values)}; first values {first}"
    return f"is on the grid: peak {peak:.6g}; first values {first}"


def _values(bits: np.ndarray) -> np.ndarray:
    """bf16 bits as float64, signed."""
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(float)


def _certified(groups: np.ndarray) -> np.ndarray:
    """bool[groups]: some peak level gives a step that rounds to every value."""
    finite = np.all((groups & 0x7FFF) < 0x7F80, axis=1)
    groups = np.where(finite[:, None], groups, 0)
    good = np.zeros(len(groups), bool)
    for level in PEAK_LEVELS:
        good |= _certified_at(groups, level)
    return good & finite


def _certified_at(groups: np.ndarray, level: int) -> np.ndarray:
    values = _values(groups)
    magnitude = np.abs(values)
    peak = np.maximum(magnitude.max(axis=1, keepdims=True), np.finfo(np.float32).tiny / 2**23)
    levels = np.rint(magnitude * (level / peak))
    used, wide = levels > 0, (groups.astype(np.int64) & 0x7FFF) << 16
    # An end is a tie, and rounds to an even mantissa: next to an odd one it is out of reach.
    ends = [_values_wide(np.where(used, wide + move, 0)) for move in (-0x8000, 0x8000)]
    inwards = np.where((groups & 1) == 1, 2.0**-20, 0.0)
    divisor = np.where(used, levels, 1)
    lo = (ends[0] * (1 + inwards) / divisor).max(axis=1)
    hi = np.where(used, ends[1] * (1 - inwards) / divisor, np.inf).min(axis=1)
    zeros = (used | (magnitude == 0)).all(axis=1)
    plus_8 = ((levels == 8) & (values > 0)).any(axis=1)
    return (lo <= hi) & zeros & ~plus_8


def _values_wide(bits: np.ndarray) -> np.ndarray:
    return bits.astype(np.uint32).view(np.float32).astype(float)


def _obstacle(values: np.ndarray) -> str:
    """Why no step fits, at the peak level that fits best."""
    ratio = np.abs(values) / np.abs(values).max()
    off = {m: np.abs(ratio * m - np.rint(ratio * m)) for m in PEAK_LEVELS}
    level = next((m for m in PEAK_LEVELS if off[m].max() <= TOLERANCE), None)
    if level is None:
        level = min(PEAK_LEVELS, key=lambda m: off[m].max())
        index = int(off[level].argmax())
        return (
            f"and with that on level {level}, which fits best, value {index} "
            f"({values[index]:.6g}) lies on {ratio[index] * level:.3f}"
        )
    top = values[np.rint(ratio * level) == 8]
    if (top > 0).any() and (top < 0).any():
        return "which lies on level 8 with both signs, and 4 bits hold -8..7"
    return f"level {level}, but no one step rounds to every value"
