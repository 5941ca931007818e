"""One block of a build against the reference, value by value.

`dispatch` runs it as one jitted function on the CPU. Groups of extreme size (a peak or a scale
outside 2^-40..2^40, which no weights have) and damaged ones go through `tally_numpy`, which
defines every figure and against which the tests hold the other.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..repack.grid import GROUP, cpu
from .exact import ON_LEVEL, ONE_ULP, STEP_ULPS, TINY, Certified, as_float32, tally_numpy
from .tally import BETWEEN, LEVELS, Tally

F32, I32, U32 = np.float32, np.int32, np.uint32
# Adding 2^23 to 0 <= x < 2^22 leaves rint(x) in the low mantissa bits.
MAGIC, MAGIC_BITS = F32(2.0**23), 0x4B000000
# Fixed point of the squares: see `_sum_rows`. An error of the peak's size is beyond it.
ERROR_BITS, NORM_BITS, FIXED_END = 22, 20, F32(2.0**22)

BLOCK_VALUES = 1 << 20
"""Values in the largest compiled block: 2 MiB of reference."""

TAIL_VALUES = 1 << 17
"""Values in the other compiled shape, to a multiple of which a smaller block is padded."""

SMALL, LARGE = F32(2.0**-40), F32(2.0**40)
ODD, WRONG = 1, 2
LEVEL_0 = 0x88
"""Two nibbles of level 0."""

TOTALS = (
    *("identical", "negative_zeros", "unrounded", "cast", "levels_differ", "step_off"),
    *("max_7_5", "negative_scales"),
    *(f"peak{m}" for m in range(BETWEEN + 1)),
)


@dataclass(frozen=True, slots=True)
class Pending:
    """A block that XLA is comparing. The inputs must stay untouched until `result` returns."""

    bits: np.ndarray
    packed: np.ndarray
    scale: np.ndarray
    certified: Certified | None
    padding: int
    raw: tuple[jax.Array, ...]

    def result(self) -> tuple[Tally, np.ndarray]:
        """Wait: the sums, and the indices of the wrong groups (levels or step)."""
        totals, flags, error, norm, power, largest = (np.asarray(x) for x in self.raw)
        squared = power.astype(np.float64) ** 2
        total = float(error @ squared) / 2**ERROR_BITS, float(norm @ squared) / 2**NORM_BITS
        tally = self._tally(totals, *total, float(largest))
        wrong = flags[: len(self.scale)] & WRONG != 0
        odd = np.flatnonzero(flags[: len(self.scale)] & ODD)
        if odd.size:
            rest, wrong_odd = self._odd(odd)
            tally += rest
            wrong[odd] = wrong_odd
        return tally, np.flatnonzero(wrong)

    def _tally(self, totals: np.ndarray, error: float, norm: float, largest: float) -> Tally:
        named = dict(zip(TOTALS, totals.tolist(), strict=True))
        peaks = [named.pop(f"peak{m}") for m in range(BETWEEN + 1)]
        peaks[0] -= self.padding
        width = self.bits.shape[1]
        for name in ("identical", "unrounded", "cast"):
            named[name] -= self.padding * width
        groups = sum(peaks)
        return Tally(
            **named,
            values=groups * width,
            groups=groups,
            zero_groups=peaks[0],
            peak_levels=tuple(peaks),
            error=error,
            norm=norm,
            largest=largest,
        )

    def _odd(self, odd: np.ndarray) -> tuple[Tally, np.ndarray]:
        certified = self.certified and self.certified.take(odd)
        return tally_numpy(self.bits[odd], self.packed[odd], self.scale[odd], certified)


def dispatch(
    bits: np.ndarray, packed: np.ndarray, scale: np.ndarray, certified: Certified | None
) -> Pending:
    """Start comparing whole groups of one size; returns at once.

    `bits: uint16[groups, size]` of the bf16 reference, `packed: uint8[groups, size/2]`, the bytes
    of the words, `scale: [groups]` in bfloat16, float16 or float32, and for groups of 32 their
    certified grid. At most `BLOCK_VALUES` values, or one group.
    """
    size = bits.shape[1]
    row = math.gcd(size, GROUP)
    groups = _padded(len(bits), size)
    arrays = [
        _pad(bits.reshape(-1, row).view("<u4"), groups * size // row, 0),
        _pad(packed.reshape(-1, row // 2), groups * size // row, LEVEL_0),
        _pad(as_float32(scale), groups, 1),
    ]
    if certified is not None:
        fill = ((certified.packed, LEVEL_0), (certified.peak, 0), (certified.step, 1))
        arrays += [_pad(a, groups, f) for a, f in fill]
        arrays.append(_pad(certified.proved.view(np.uint8), groups, 1))
    # All at once: a call costs a tenth of a block.
    on_device = jax.device_put(arrays, cpu())
    raw = _compare(*on_device, size=size, cast=scale.dtype.itemsize != 2 or scale.dtype == "f2")
    return Pending(bits, packed, scale, certified, groups - len(bits), raw)


def block_groups(size: int) -> int:
    """Groups of a size that a block holds at most; blocks begin at whole groups of 32."""
    together = GROUP // math.gcd(size, GROUP)
    return max(together, BLOCK_VALUES // size // together * together)


def _padded(groups: int, size: int) -> int:
    """One of two shapes for each group size, so that little is compiled."""
    tail = max(1, TAIL_VALUES // size)
    rounded = -(-groups // tail) * tail
    return rounded if rounded <= tail else max(block_groups(size), groups)


def _pad(array: np.ndarray, length: int, fill: int) -> np.ndarray:
    if len(array) == length:
        return array
    rest = np.full((length - len(array), *array.shape[1:]), fill, array.dtype)
    return np.concatenate([array, rest])


def _bits(x, dtype):
    return lax.bitcast_convert_type(x, dtype)


def _flag(condition, value=1):
    return jnp.where(condition, U32(value), U32(0))


def _to_bf16(bits):
    """float32 bits rounded to bfloat16, nearest even, as float32 bits."""
    return (bits + U32(0x7FFF) + ((bits >> U32(16)) & U32(1))) & U32(0xFFFF0000)


def _levels(packed):
    """Levels of the two columns of each byte, f32."""
    offset = F32(2.0**23 + 8)
    low = _bits((packed & np.uint8(15)).astype(U32) | U32(MAGIC_BITS), F32) - offset
    high = _bits((packed >> np.uint8(4)).astype(U32) | U32(MAGIC_BITS), F32) - offset
    return low, high


def _terms(reference, level, scale, cast, unit, peak):
    """Per value: counts, error and norm in fixed point, relative error; see `_sum_rows`."""
    product = _bits(scale * level, U32)
    decoded = _to_bf16(product)
    zero = (reference ^ decoded == U32(0x80000000)) & (reference << U32(1) == U32(0))
    counts = _flag(decoded == reference) + _flag(zero, 1 << 6)
    counts += _flag(product == reference, 1 << 12)
    if cast is not None:
        counts += _flag(_to_bf16(_bits(cast * level, U32)) == reference, 1 << 18)
    off = jnp.abs(_bits(decoded, F32) - _bits(reference, F32))
    error = (off * unit) ** 2 * F32(2**ERROR_BITS)
    counts += _flag(error >= FIXED_END, 1 << 24)
    value = _bits(reference, F32) * unit
    fixed = (_fixed(jnp.minimum(error, FIXED_END)), _fixed(value * value * F32(2**NORM_BITS)))
    return counts, *fixed, _relative(reference, off, peak)


def _fixed(x):
    """rint of 0 <= x <= 2^22, with `MAGIC_BITS` still added, uint32."""
    return _bits(x + MAGIC, U32)


def _relative(reference, off, peak):
    """Bits of `off` over |reference|, or over `peak` where that is 0: int32."""
    magnitude = reference & U32(0x7FFFFFFF)
    divisor = jnp.where(magnitude < U32(TINY << 16), peak, _bits(magnitude, F32))
    # A group of zeros has the divisor 0: nothing off is no error, anything else counts as 1.
    ratio = jnp.where(divisor == F32(0), _flag(off > F32(0), 0x3F800000), _bits(off / divisor, U32))
    return _bits(ratio, I32)


def _per_group(rows, ratio):
    """The largest of the rows of each group, and that given back to all of them; integers."""
    if ratio == 1:
        return rows, rows
    group = lax.reduce(rows.reshape(-1, ratio), I32(0), jnp.maximum, (1,))
    return group, jnp.repeat(group, ratio)


def _sum(flags):
    """How many of each of several bool[groups] hold: uint32 scalars."""
    add = lambda a, b: tuple(x + y for x, y in zip(a, b, strict=True))  # noqa: E731
    columns = tuple(_flag(f) for f in flags)
    return lax.reduce(columns, (U32(0),) * len(columns), add, (0,))


@functools.partial(jax.jit, static_argnames=("size", "cast"))
def _compare(words, packed, scale, *certified, size, cast):
    """Totals, flags[groups], error, norm and power[rows], and largest of one block.

    The words of a group lie in `ratio` rows. All reductions are over integers: XLA does not
    vectorise a float sum, and its order could change from machine to machine.
    """
    ratio = size // packed.shape[1] // 2
    magnitude = jnp.maximum((words << U32(16)) & U32(0x7FFF0000), words & U32(0x7FFF0000))
    row_peak = lax.reduce(_bits(magnitude, I32), I32(0), jnp.maximum, (1,))
    peak, row_peak = (_bits(p, F32) for p in _per_group(row_peak, ratio))
    absolute = jnp.abs(scale)
    normal = (absolute >= SMALL) & (absolute <= LARGE) & (peak <= LARGE)
    # By its bits: XLA on a CPU flushes a denormal peak to zero.
    normal &= (peak >= SMALL) | (_bits(peak, U32) == U32(0))
    row_scale = jnp.repeat(scale, ratio) if ratio > 1 else scale

    power = _bits(_bits(row_peak, U32) & U32(0x7F800000), F32)
    *sums, largest = _sum_rows(words, packed, row_scale, row_peak, power, cast)
    over, _ = _per_group(_bits(sums[0] >> U32(24), I32), ratio)
    normal &= over == I32(0)
    keep = jnp.repeat(normal, ratio) if ratio > 1 else normal
    counts, error, norm = (jnp.where(keep, s, U32(0)) for s in sums)
    power = jnp.where(keep, power, F32(0))

    shifts = (0, 6, 12, 18 if cast else 0)
    totals = [((counts >> U32(shift)) & U32(63)).sum() for shift in shifts]
    none = jnp.zeros_like(normal)
    differ, off = _wrong(packed, scale, *certified) if certified else (none, none)
    facts = (differ, off, *_peak_facts(peak, scale))
    totals += _sum([normal & fact for fact in facts])
    flags = _flag(~normal, ODD) | _flag(differ | off, WRONG)
    most = _bits(jnp.where(keep, largest, I32(0)).max(), F32)
    return jnp.stack(totals).astype(I32), flags.astype(jnp.uint8), error, norm, power, most


def _sum_rows(words, packed, scale, peak, power, cast):
    """Over the values of each row, in one pass over the words.

    Counts, six bits each: identical, zeros of the other sign, unrounded, cast, beyond the fixed
    point. Error and norm, sums of squares in units of `power`^2 * 2^-ERROR_BITS and -NORM_BITS,
    uint32, where `power` <= peak < 2 * power: exact for values and differences of levels 1..8,
    which are multiples of 2^-11 * power. Largest relative error, int32 bits.
    """
    rounded = _bits(_to_bf16(_bits(scale, U32)), F32)[:, None] if cast else None
    unit = _bits(U32(254 << 23) - _bits(power, U32), F32)[:, None]
    low, high = (
        _terms(reference, level, scale[:, None], rounded, unit, peak[:, None])
        for reference, level in zip(
            (words << U32(16), words & U32(0xFFFF0000)), _levels(packed), strict=True
        )
    )
    start = (U32(0), U32(0), U32(0), I32(0))
    counts, error, norm, largest = lax.reduce(_combine(low, high), start, _combine, (1,))
    excess = U32(2 * words.shape[1] * MAGIC_BITS % 2**32)
    return counts, error - excess, norm - excess, largest


def _combine(a, b):
    """Three sums and a maximum."""
    return (*(x + y for x, y in zip(a[:3], b[:3], strict=True)), jnp.maximum(a[3], b[3]))


def _wrong(packed, scale, certified, peak, step, proved):
    """Groups of 32 with other levels than the certified ones, and those with another step."""
    ours, theirs = _levels(packed), _levels(certified)
    top = _bits(jnp.maximum(jnp.abs(ours[0]), jnp.abs(ours[1])), I32)
    top = _bits(lax.reduce(top, I32(0), jnp.maximum, (1,)), F32)
    trained = peak.astype(F32)
    signed = jnp.where(scale < F32(0), -trained, trained)[:, None]
    unlike = sum(_flag(a * signed != b * top[:, None]) for a, b in zip(ours, theirs, strict=True))
    unlike = lax.reduce(unlike, U32(0), lax.add, (1,))
    known = proved != np.uint8(0)
    differ = ((unlike != U32(0)) | ((top == F32(0)) != (trained == F32(0)))) & known
    ends = [_bits(jnp.abs(x), I32) for x in (scale * top, step * trained)]
    far = jnp.abs(ends[0] - ends[1]) > I32(STEP_ULPS)
    return differ, far & ~differ & (trained > F32(0)) & known


def _peak_facts(peak, scale):
    """bool[groups] for max/7.5, a negative scale, and each entry of the level histogram."""
    absolute = jnp.abs(scale)
    target = _bits(peak / F32(7.5), I32)
    some = peak > F32(0)
    near = some & (jnp.abs(_bits(absolute, I32) - target) <= I32(ONE_ULP))
    ratio = peak / absolute
    level = _bits(jnp.minimum(ratio, F32(100)) + MAGIC, U32) - U32(MAGIC_BITS)
    whole = jnp.abs(ratio - level.astype(F32)) <= F32(ON_LEVEL)
    whole &= (level >= U32(1)) & (level <= U32(LEVELS))
    entry = jnp.where(some, jnp.where(whole, level, U32(BETWEEN)), U32(0))
    return [near, scale < F32(0), *(entry == U32(m) for m in range(BETWEEN + 1))]
