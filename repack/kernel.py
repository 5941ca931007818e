"""The jitted recovery of a block of groups: bf16 bits in, packed levels and scales out.

A group is 32 bf16 values, seen as 16 little-endian uint32 words; word t holds column 2t in its
low half and column 2t+1 in its high half, and byte t of the packed output holds the same two.

Every pass is one reduction over the words, so that XLA fuses it into one vectorised loop, and
every reduction is over integers: a float max carries NaN handling, and a float sum could be
reassociated differently on another machine. Steps, scales and levels are therefore the same
bytes on every CPU.
"""

from __future__ import annotations

import enum
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


class Status(enum.IntEnum):
    """What the proof found in one group; stored as uint8."""

    ZERO = 0
    """Every value is zero, of either sign: levels 0, scale 1."""
    CERTIFIED = 1
    """One positive step and levels -8..7 reproduce all values."""
    OFF_GRID = 2
    """No step reproduces all values."""
    NEEDS_NEGATIVE_STEP = 3
    """Only a negative step does: a positive value sits on level +8."""
    NON_FINITE = 4
    """A NaN or an infinity."""


TINY = 255
"""Status of groups left to `qatpack.repack.tiny`: XLA on a CPU flushes denormals to zero."""

SMALLEST = 0x0880
"""Bits of the smallest peak handled here, 2^-110: all products and quotients stay normal."""

F32, I32, U32 = np.float32, np.int32, np.uint32
INF = 0x7F80
# Adding 2^23 to 0 <= x < 2^22 leaves rint(x) in the low mantissa bits; a conversion to int
# would cost XLA's clamping of every out-of-range case.
MAGIC = F32(2.0**23)
MAGIC_BITS = 0x4B000000
# An end of a step interval that ties the right way (even mantissa) is moved outwards by CLOSED
# float32 ulps, one that does not inwards by 3 * CLOSED. True ends differ by 2^-12 or not at all,
# float16 candidates keep 2^-14 from an end they do not sit on, so 2^-17 decides every tie and
# hides the rounding of the reciprocal.
CLOSED = 0x20
OPEN_BIT = 7


class Block(NamedTuple):
    """What one block yields; arrays have one entry per group."""

    packed: jax.Array  # uint8[groups, 16]
    scale: jax.Array  # uint16[groups] bits of bfloat16 or float16, or uint32[groups] of float32
    status: jax.Array  # uint8[groups]
    peak: jax.Array  # uint8[groups]
    lo: jax.Array  # float32[groups]
    hi: jax.Array  # float32[groups]
    step: jax.Array  # float32[groups]
    totals: jax.Array  # int32[len(TOTALS)]


TOTALS = (
    *("zero", "certified", "exact_bf16", "exact_f16", "off_grid", "needs_negative_step"),
    *("non_finite", "identical", "negative_zeros", "peak4", "peak5", "peak6", "peak7", "peak8"),
)
"""Names of `Block.totals`; tiny groups are in none of them."""


def _bits(x, dtype):
    return lax.bitcast_convert_type(x, dtype)


def _float(bits):
    return _bits(bits, F32)


def _halves(words):
    """The two columns of each word, as the bits of float32 values."""
    return words << U32(16), words & U32(0xFFFF0000)


def _magnitudes(words):
    return (words << U32(16)) & U32(0x7FFF0000), words & U32(0x7FFF0000)


def _reduce(operands, inits, combine):
    """One loop for several reductions over the words of a group."""
    return lax.reduce(
        operands,
        inits,
        lambda a, b: tuple(f(x, y) for f, x, y in zip(combine, a, b, strict=True)),
        (1,),
    )


def _peaks(words):
    """Largest positive and largest negative magnitude, uint32[groups] of bf16 bits."""
    signed = _bits(words, I32)
    signed = jnp.maximum(signed, signed << I32(16))
    unsigned = jnp.maximum(words, words << U32(16))
    top, bottom = _reduce((signed, unsigned), (I32(0), U32(0)), (jnp.maximum, jnp.maximum))
    top, bottom = _bits(top, U32) >> U32(16), bottom >> U32(16)
    return top, jnp.where(bottom >= U32(0x8000), bottom & U32(0x7FFF), U32(0))


def _fits(words, peak_value):
    """Which peak levels 4..8 put every value within 1/16 of a level: five bool[groups].

    A genuine grid deviates by at most 13.2/256 (level 7 of 8), a wrong level by at least 0.077.
    A fraction of the peak is 16 bits, two to a word, so its multiples wrap to the deviation and
    one addition and one OR test a level for two values; the carry between them is 2^-16.
    """
    unit = (F32(65536) / peak_value)[:, None]
    low, high = (_bits(_float(m) * unit + MAGIC, U32) for m in _magnitudes(words))
    x = (low & U32(0xFFFF)) + (high << U32(16))
    z, fields = (x << U32(2)) + U32(0x10001000), U32(0)
    for level in range(4, 9):
        fields = fields | ((z & U32(0xE000E000)) >> U32(3 * (level - 4)))
        z = z + x
    fields = lax.reduce(fields, U32(0), lax.bitwise_or, (1,))
    fields = fields | (fields << U32(16))
    return [(fields & U32(0xE0000000 >> (3 * i))) == U32(0) for i in range(5)]


def _peak_level(words, peak_value, lands_on_plus_8):
    """The level of the largest magnitude, f32[groups]; levels 1-3 are their doubles."""
    fits4, fits5, fits6, fits7, fits8 = _fits(words, peak_value)
    level = jnp.where(fits8, F32(8), F32(5))
    for fits, m in ((fits5, 5), (fits6, 6), (fits7, 7), (fits4, 4)):
        level = jnp.where(fits, F32(m), level)
    return jnp.where(fits8 & ~lands_on_plus_8, F32(8), level)


def _level(magnitude, per_level):
    return lax.round(_float(magnitude) * per_level, lax.RoundingMethod.TO_NEAREST_EVEN)


def _ends(magnitude, per_level):
    """Ends of the interval of steps that round back to one value, as int32 bits."""
    level = _level(magnitude, per_level)
    inverse = F32(1) / level
    inwards = ((magnitude >> U32(16)) & U32(1)) << U32(OPEN_BIT)
    lo = _float(magnitude - U32(0x8000 + CLOSED) + inwards) * inverse
    hi = _float(magnitude + U32(0x8000 + CLOSED) - inwards) * inverse
    return _bits(lo, I32), _bits(hi, I32)


def _interval(words, peak_bits, per_level):
    """Steps that round back to every value: lo and hi, f32[groups]; empty when lo > hi."""
    low, high = (
        # A zero allows every step: let it repeat the peak. A denormal beside a normal peak is
        # on no level: keep it from being flushed to zero, so that 1/0 empties the interval.
        jnp.maximum(jnp.where(m == U32(0), peak_bits[:, None], m), U32(0x01000000))
        for m in _magnitudes(words)
    )
    (lo0, hi0), (lo1, hi1) = (_ends(m, per_level[:, None]) for m in (low, high))
    lo, hi = _reduce(
        (jnp.maximum(lo0, lo1), jnp.minimum(hi0, hi1)),
        (I32(0), I32(INF << 16)),
        (jnp.maximum, jnp.minimum),
    )
    return _float(lo), _float(hi)


def _neighbours(mid, scale_dtype):
    """The numbers of a 16-bit dtype on either side of `mid` > 0, as f32[groups]."""
    bits = _bits(mid, U32)
    if scale_dtype == "bfloat16":
        below = bits & U32(0xFFFF0000)
        return _float(below), _float(below + U32(0x10000))
    below = bits & U32(0xFFFFE000)
    floor = jnp.floor(mid * F32(2**24)) * F32(2**-24)
    normal = mid >= F32(2**-14)
    below, above = (
        jnp.where(normal, _float(below), floor),
        jnp.where(normal, _float(below + U32(0x2000)), floor + F32(2**-24)),
    )
    return tuple(jnp.clip(x, F32(2**-24), F32(65504)) for x in (below, above))


def _nearest(mid, pair):
    below, above = pair
    return jnp.where(above - mid < mid - below, above, below)


def _half_bits(scale):
    """float16 bits of f32 numbers that float16 holds exactly, subnormal ones among them."""
    normal = (_bits(scale, U32) >> U32(13)) - U32(112 << 10)
    subnormal = _bits(scale * F32(2**24) + MAGIC, U32) & U32(0x3FF)
    return jnp.where(scale >= F32(2**-14), normal, subnormal)


def _flag(condition, value):
    return jnp.where(condition, U32(value), U32(0))


def _tally(magnitude, raw, per_level, step, pair, unit):
    """Per-value terms of `_score` for one column of each word."""
    level = _level(magnitude, per_level)
    ends = _bits(magnitude, I32)
    odd = (ends >> I32(16)) & I32(1)
    near = jnp.abs(_bits(step * level, I32) - ends) + odd
    count = _flag(near <= I32(0x8000), 1) + _flag(raw == U32(0x80000000), 1 << 6)
    if pair is None:
        return (count,)
    below, above = (_bits(scale * level, I32) for scale in pair)
    reach = I32(0x8000) - odd
    count = count + _flag(below >= ends - reach, 1 << 12) + _flag(above <= ends + reach, 1 << 18)
    product = level * (_float(magnitude) * unit)
    return count, _bits(product + MAGIC, U32), _bits(level * level + MAGIC, U32)


class _Score(NamedTuple):
    decoded: jax.Array  # values that the float32 step reproduces
    negative_zeros: jax.Array
    below: jax.Array | None = None  # values that the smaller 16-bit candidate reproduces
    above: jax.Array | None = None
    products: jax.Array | None = None  # sum of level * |value| * unit
    squares: jax.Array | None = None  # sum of level^2


def _score(words, per_level, step, pair, unit):
    """Decode every value with the step, and with the 16-bit candidates on either side.

    Rounding is monotone in the step and every value's own interval contains the group's, so a
    candidate below it fails only the lower ends, and one above it only the upper ends.
    """
    column = lambda x: x[:, None]  # noqa: E731
    args = (column(per_level), column(step), pair and tuple(map(column, pair)), column(unit))
    low, high = (
        _tally(m, raw, *args) for m, raw in zip(_magnitudes(words), _halves(words), strict=True)
    )
    sums = tuple(a + b for a, b in zip(low, high, strict=True))
    sums = _reduce(sums, (U32(0),) * len(sums), (lax.add,) * len(sums))
    counts = [(sums[0] >> U32(shift)) & U32(63) for shift in (0, 6, 12, 18)]
    if pair is None:
        return _Score(*counts[:2])
    excess = U32(32 * MAGIC_BITS % 2**32)
    return _Score(*counts, *((s - excess).astype(F32) for s in sums[1:]))


def _choose(score, lo, hi, mid, pair, unit):
    """The better 16-bit candidate and how many values it reproduces.

    An exact one nearest the centre; else the one that reproduces most values; else the one with
    the smaller sum of (scale * level - value)^2; else the nearest. No other number of the dtype
    reproduces more, see `_score`.
    """
    below, above = pair
    near = _nearest(mid, pair)
    exact = (lo <= near) & (near <= hi)
    # Exact in float32: at most 12 bits times 12, against a sum below 2^21.
    twice_fit = (below + above) * unit * score.squares
    closer = jnp.where(
        twice_fit == F32(2) * score.products,
        near == above,
        twice_fit < F32(2) * score.products,
    )
    upper = (score.above > score.below) | ((score.above == score.below) & closer)
    # Both candidates clamped to the same side of the interval: only that side's count holds.
    upper = (upper & ~(above < lo)) | (below > hi)
    upper = jnp.where(exact, near == above, upper)
    return jnp.where(upper, above, below), jnp.where(upper, score.above, score.below)


def _pack(words, per_level):
    """Levels + 8, two to a byte: uint8[groups, 16]."""
    low, high = (
        _bits(_float(h) * per_level[:, None] + F32(1.5 * 2**23 + 8), U32) for h in _halves(words)
    )
    return ((low & U32(15)) | ((high & U32(15)) << U32(4))).astype(jnp.uint8)


def _status(peak, decoded, lands_on_plus_8, lands_on_minus_8):
    refused = jnp.where(lands_on_minus_8, U32(Status.OFF_GRID), U32(Status.NEEDS_NEGATIVE_STEP))
    status = jnp.where(lands_on_plus_8, refused, U32(Status.CERTIFIED))
    status = jnp.where(decoded == U32(32), status, U32(Status.OFF_GRID))
    status = jnp.where(peak < U32(SMALLEST), U32(TINY), status)
    status = jnp.where(peak == U32(0), U32(Status.ZERO), status)
    return jnp.where(peak >= U32(INF), U32(Status.NON_FINITE), status)


def _totals(status, level, exact_bf16, exact_f16, identical, negative_zeros):
    certified = status == U32(Status.CERTIFIED)
    zero = status == U32(Status.ZERO)
    columns = (
        *(_flag(zero, 1), _flag(certified, 1)),
        *(_flag(certified & exact_bf16, 1), _flag(certified & exact_f16, 1)),
        *(_flag(status == U32(code), 1) for code in (2, 3, 4)),
        *(jnp.where(zero | certified, x, U32(0)) for x in (identical, negative_zeros)),
        *(_flag(certified & (level == F32(m)), 1) for m in range(4, 9)),
    )
    add = lambda a, b: tuple(x + y for x, y in zip(a, b, strict=True))  # noqa: E731
    return jnp.stack(lax.reduce(columns, (U32(0),) * len(columns), add, (0,))).astype(I32)


@functools.partial(jax.jit, static_argnames="scale_dtype")
def recover_words(words, *, scale_dtype):
    """Recover one block: `words: uint32[groups, 16]` to `Block`."""
    positive, negative = _peaks(words)
    peak = jnp.maximum(positive, negative)
    usable = (peak >= U32(SMALLEST)) & (peak < U32(INF))
    peak_bits = jnp.where(usable, peak << U32(16), U32(0x3F800000))
    peak_value = _float(peak_bits)
    near_peak = F32(7.5 / 8) * peak_value
    reaches_8 = _float(positive << U32(16)) >= near_peak
    level = _peak_level(words, peak_value, reaches_8)
    per_level = level / peak_value

    lo, hi = _interval(words, peak_bits, per_level)
    mid = lo + F32(0.5) * (hi - lo)
    holds = lambda scale: (lo <= scale) & (scale <= hi)  # noqa: E731
    nearest = _nearest(mid, _neighbours(mid, "bfloat16"))
    half = _nearest(mid, _neighbours(mid, "float16"))
    step = jnp.where(holds(nearest), nearest, mid)

    pair = None if scale_dtype == "float32" else _neighbours(mid, scale_dtype)
    # 2^11 over the peak's power of two makes every value on a level an integer below 2^12.
    unit = F32(2.0**11) / _float(peak_bits & U32(INF << 16))
    score = _score(words, per_level, step, pair, unit)
    scale, identical = (
        (step, score.decoded) if pair is None else _choose(score, lo, hi, mid, pair, unit)
    )
    is_8 = level == F32(8)
    minus_8 = is_8 & (_float(negative << U32(16)) >= near_peak)
    status = _status(peak, score.decoded, is_8 & reaches_8, minus_8)
    scale = jnp.where(peak == U32(0), F32(1), scale)
    identical = jnp.where(peak == U32(0), U32(32), identical) - score.negative_zeros
    return Block(
        packed=_pack(words, per_level),
        scale=_scale_bits(scale, scale_dtype),
        status=status.astype(jnp.uint8),
        peak=jnp.where(peak == U32(0), F32(0), level).astype(jnp.uint8),
        lo=lo,
        hi=hi,
        step=step,
        totals=_totals(status, level, holds(nearest), holds(half), identical, score.negative_zeros),
    )


def _scale_bits(scale, scale_dtype):
    if scale_dtype == "float32":
        return _bits(scale, U32)
    bits = _half_bits(scale) if scale_dtype == "float16" else _bits(scale, U32) >> U32(16)
    return bits.astype(jnp.uint16)
