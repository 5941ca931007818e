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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .packing import GROUP


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


TINY = len(Status)
"""Status of groups left to `qatpack.repack.tiny`: XLA on a CPU flushes denormals to zero."""

SMALLEST = 0x0880
"""Bits of the smallest peak handled here, 2^-110: all products and quotients stay normal."""

F32, I32, U32 = np.float32, np.int32, np.uint32
INF = 0x7F80
# Adding 2^23 to 0 <= x < 2^22 leaves rint(x) in the low mantissa bits; a conversion to int
# would cost XLA's clamping of every out-of-range case.
MAGIC = F32(2.0**23)
# An end of a step interval that ties the right way (even mantissa) is moved outwards by CLOSED
# float32 ulps, one that does not inwards by 3 * CLOSED, at most 2^-17. True ends differ by 2^-12
# or not at all, and a float16 candidate keeps 2^-14 from an end it does not sit on: so every tie
# is decided, and the rounding of the reciprocal cannot matter.
CLOSED = 0x10


class Block(NamedTuple):
    """What one block yields, one entry per group: jax arrays, or numpy ones once fetched."""

    packed: Any  # uint8[groups, 16]
    scale: Any  # uint16[groups] bits of bfloat16 or float16, or uint32[groups] of float32
    status: Any  # uint8[groups] of Status, or TINY
    peak: Any  # uint8[groups]
    lo: Any  # float32[groups]
    hi: Any  # float32[groups]
    step: Any  # float32[groups]
    identical: Any  # uint8[groups], of zero and certified groups, else 0
    negative_zeros: Any  # uint8[groups], likewise
    flags: Any  # uint8[groups] of EXACT_BF16 | EXACT_F16 | TIED, likewise


EXACT_BF16, EXACT_F16, TIED = 1, 2, 4
"""Flags: a step of that dtype is exact; both neighbours reproduce equally many values, and the
scale is the lower one."""


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


def interval_ends(magnitude, level):
    """Ends of the interval of steps that round back to one value from its level > 0, f32."""
    inverse = F32(1) / level
    odd = (magnitude >> U32(16)) & U32(1)
    reach = U32(0x8000 + CLOSED) - odd * U32(4 * CLOSED)
    return _float(magnitude - reach) * inverse, _float(magnitude + reach) * inverse


def _ends(magnitude, per_level):
    """The same as int32 bits, the level from the share of the peak."""
    return tuple(_bits(x, I32) for x in interval_ends(magnitude, _level(magnitude, per_level)))


def _interval(words, peak_bits, per_level):
    """Steps that round back to every value: lo and hi, f32[groups]; empty when lo > hi."""
    # A zero allows every step: let it repeat the peak. Another value on level 0 divides by zero;
    # whatever becomes of the interval, decoding refuses the group.
    low, high = (jnp.where(m == U32(0), peak_bits[:, None], m) for m in _magnitudes(words))
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


def trained_step(lo, hi):
    """The centre of an interval of steps, the step (the bfloat16 number nearest to it, or else
    the centre itself), and whether it is that number; f32, f32 and bool[groups]."""
    mid = lo + F32(0.5) * (hi - lo)
    nearest = _nearest(mid, _neighbours(mid, "bfloat16"))
    inside = (lo <= nearest) & (nearest <= hi)
    return mid, jnp.where(inside, nearest, mid), inside


def _half_bits(scale):
    """float16 bits of f32 numbers that float16 holds exactly, subnormal ones among them."""
    normal = (_bits(scale, U32) >> U32(13)) - U32(112 << 10)
    subnormal = _bits(scale * F32(2**24) + MAGIC, U32) & U32(0x3FF)
    return jnp.where(scale >= F32(2**-14), normal, subnormal)


def _flag(condition, value):
    return jnp.where(condition, U32(value), U32(0))


def _tally(magnitude, raw, per_level, step, pair):
    """Terms of `_score` for one column of each word: int32 and uint32."""
    level = _level(magnitude, per_level)
    bits = _bits(magnitude, I32)
    odd = (bits >> I32(16)) & I32(1)
    miss = jnp.abs(_bits(step * level, I32) - bits) + odd
    count = _flag(raw == U32(0x80000000), 1)
    if pair is not None:
        below, above = (_bits(scale * level, I32) for scale in pair)
        reach = I32(0x8000) - odd
        count = count + _flag(below >= bits - reach, 1 << 8)
        count = count + _flag(above <= bits + reach, 1 << 16)
    return miss, count


class _Score(NamedTuple):
    decoded: jax.Array  # bool[groups]: the float32 step reproduces every value
    negative_zeros: jax.Array  # uint32[groups]
    below: jax.Array  # values that the smaller 16-bit candidate reproduces, uint32[groups]
    above: jax.Array  # and the larger one


def _score(words, per_level, step, pair):
    """Decode every value with the step, and with the 16-bit candidates on either side.

    A product rounds to a value when their bits differ by at most half a bf16 ulp, 0x8000, and
    by less for an odd mantissa. Rounding is monotone and every value's own interval contains the
    group's, so a step below that one fails at lower ends only, and one above at upper ends only.
    """
    per_level, step = per_level[:, None], step[:, None]
    pair = None if pair is None else tuple(x[:, None] for x in pair)
    (miss0, count0), (miss1, count1) = (
        _tally(m, raw, per_level, step, pair)
        for m, raw in zip(_magnitudes(words), _halves(words), strict=True)
    )
    miss, count = _reduce(
        (jnp.maximum(miss0, miss1), count0 + count1), (I32(0), U32(0)), (jnp.maximum, lax.add)
    )
    fields = (count & U32(0xFF), (count >> U32(8)) & U32(0xFF), count >> U32(16))
    return _Score(miss <= I32(0x8000), *fields)


def _choose(score, lo, hi, mid, pair):
    """The 16-bit scale, how many values it reproduces, and whether squared error must decide."""
    below, above = pair
    near = _nearest(mid, pair)
    exact = (lo <= near) & (near <= hi)
    # Both candidates clamped to one side of the interval: only that side's count holds.
    all_above, all_below = below > hi, above < lo
    upper = (score.above > score.below) & ~all_below | all_above
    upper = jnp.where(exact, near == above, upper)
    tied = (score.above == score.below) & ~(exact | all_above | all_below)
    return (
        jnp.where(upper, above, below),
        jnp.where(upper, score.above, score.below),
        tied,
    )


def _pack(words, per_level):
    """Levels + 8, two to a byte: uint8[groups, 16]."""
    low, high = (
        _bits(_float(h) * per_level[:, None] + F32(1.5 * 2**23 + 8), U32) for h in _halves(words)
    )
    return ((low & U32(15)) | ((high & U32(15)) << U32(4))).astype(jnp.uint8)


def _status(peak, decoded, lands_on_plus_8, lands_on_minus_8):
    refused = jnp.where(lands_on_minus_8, U32(Status.OFF_GRID), U32(Status.NEEDS_NEGATIVE_STEP))
    status = jnp.where(lands_on_plus_8, refused, U32(Status.CERTIFIED))
    status = jnp.where(decoded, status, U32(Status.OFF_GRID))
    status = jnp.where(peak < U32(SMALLEST), U32(TINY), status)
    status = jnp.where(peak == U32(0), U32(Status.ZERO), status)
    return jnp.where(peak >= U32(INF), U32(Status.NON_FINITE), status)


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
    mid, step, exact_bf16 = trained_step(lo, hi)
    half = _nearest(mid, _neighbours(mid, "float16"))

    pair = None if scale_dtype == "float32" else _neighbours(mid, scale_dtype)
    score = _score(words, per_level, step, pair)
    if pair is None:
        scale, identical, tied = step, U32(GROUP), np.False_
    else:
        scale, identical, tied = _choose(score, lo, hi, mid, pair)

    is_8 = level == F32(8)
    minus_8 = is_8 & (_float(negative << U32(16)) >= near_peak)
    status = _status(peak, score.decoded, is_8 & reaches_8, minus_8)
    zero, certified = status == U32(Status.ZERO), status == U32(Status.CERTIFIED)
    identical = jnp.where(zero, U32(GROUP), identical) - score.negative_zeros
    exact_f16 = (lo <= half) & (half <= hi)
    flags = _flag(exact_bf16, EXACT_BF16) | _flag(exact_f16, EXACT_F16) | _flag(tied, TIED)
    small = lambda x, where: jnp.where(where, x, U32(0)).astype(jnp.uint8)  # noqa: E731
    return Block(
        packed=_pack(words, per_level),
        scale=_scale_bits(jnp.where(zero, F32(1), scale), scale_dtype),
        status=status.astype(jnp.uint8),
        peak=jnp.where(zero, F32(0), level).astype(jnp.uint8),
        lo=lo,
        hi=hi,
        step=step,
        identical=small(identical, zero | certified),
        negative_zeros=small(score.negative_zeros, zero | certified),
        flags=small(flags, certified),
    )


def _scale_bits(scale, scale_dtype):
    if scale_dtype == "float32":
        return _bits(scale, U32)
    bits = _half_bits(scale) if scale_dtype == "float16" else _bits(scale, U32) >> U32(16)
    return bits.astype(jnp.uint16)
