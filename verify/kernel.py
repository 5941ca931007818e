"""The jitted comparison of a block: reference bits, packed levels and scales in, sums out.

A group is seen as rows of up to 16 little-endian words, as in `repack.kernel`: word t holds
columns 2t and 2t + 1, and byte t of the packed row holds their levels. All reductions are over
integers: XLA does not vectorise a float sum, and its order could change from machine to machine.

Proof by the build's own levels (groups of 32). Each value allows an interval of steps that round
back to it from its stored level; where all 32 have one in common, the stored levels are a grid of
the reference. There is no other: two fractions j/m of levels up to 8 differ by 1.8 % of the peak
or not at all, and two roundings to 8 bits by 0.8 %, so every other assignment is a multiple. The
interval and the step are those that `repack.kernel` finds, bit for bit, since the level of the
peak is the same or twice it. Where it could be a third one (groups of zeros and peaks only, peaks
below 4), where the step is negative, or where the proof fails, the group is `UNSURE`: its grid
must be recovered from the reference.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..repack.kernel import Status, interval_ends, recover_words, trained_step
from ..repack.packing import GROUP
from .exact import HALF_UNIT, ON_LEVEL, ONE_ULP, STEP_ULPS, TINY
from .tally import BETWEEN, LEVELS

F32, I32, U32 = np.float32, np.int32, np.uint32
# Adding 2^23 to 0 <= x < 2^22 leaves rint(x) in the low mantissa bits.
MAGIC, MAGIC_BITS = F32(2.0**23), 0x4B000000
# Fixed point of the squares: see `_terms`. An error of the peak's size is beyond it.
ERROR_BITS, NORM_BITS, FIXED_END = 22, 20, F32(2.0**22)
SMALL, LARGE = F32(2.0**-40), F32(2.0**40)
INFINITE = U32(0x7F800000)
MAGNITUDE = U32(0x7FFFFFFF)

ENTRY = 16
"""Codes of a group are its entry of the level histogram, 0 to 9, and these flags above it."""

MAX_7_5, NEGATIVE, ROUNDED, WHOLE, WRONG, UNSURE, ODD = (ENTRY << i for i in range(7))
"""MAX_7_5: the scale is the peak / 7.5. ROUNDED: see `Tally.rounded_steps`. WHOLE: every value
decodes to the reference's (zeros of either sign). WRONG: the stored levels are proved, the scale
is off. UNSURE: they are not. ODD: of extreme size or damaged, and nothing else is said."""

CODES = 2 * ODD


class Sums(NamedTuple):
    """What one block yields: jax arrays, or numpy ones once fetched. Odd groups add nothing."""

    codes: Any  # uint16[groups]
    counts: Any  # uint32[rows], of eight bits each: see `_terms`
    error: Any  # uint32[rows] in units of power^2 * 2^-ERROR_BITS
    norm: Any  # uint32[rows] in units of power^2 * 2^-NORM_BITS
    power: Any  # f32[rows]: the power of two below the group's peak, 0 where it is odd
    largest: Any  # f32[rows]


def _bits(x, dtype):
    return lax.bitcast_convert_type(x, dtype)


def _float(bits):
    return _bits(bits, F32)


def _flag(condition, value=1):
    return jnp.where(condition, U32(value), U32(0))


def _to_bf16(bits):
    """float32 bits rounded to bfloat16, nearest even, as float32 bits."""
    return (bits + U32(0x7FFF) + ((bits >> U32(16)) & U32(1))) & U32(0xFFFF0000)


def _nibbles(packed):
    """Level + 8 of the two columns of each byte, uint32."""
    wide = packed.astype(U32)
    return wide & U32(15), wide >> U32(4)


def _level(nibble):
    return _float(nibble | U32(MAGIC_BITS)) - F32(2.0**23 + 8)


class _Group(NamedTuple):
    """What the values of a group are held against, f32[rows, 1]."""

    scale: Any
    cast: Any  # the scale rounded to bf16, None where it is one
    unit: Any  # 1 / power
    peak: Any  # 1 for a group of zeros


def _terms(reference, nibble, group, certify):
    """Of one column of each word, uint32 each, to be combined by `_COMBINE`.

    Counts, eight bits each: identical, zeros of the other sign, unrounded, cast. Error and norm:
    squares in fixed point, exact for values and differences of levels 1..8, which are multiples
    of 2^-11 * power. Largest error, squared. Largest relative error. With `certify`, the levels
    seen, a bit each, and the ends of the interval of steps.
    """
    level = _level(nibble)
    product = _bits(group.scale * level, U32)
    decoded = _to_bf16(product)
    magnitude = reference & MAGNITUDE
    zero = magnitude == U32(0)
    counts = _flag(decoded == reference)
    counts |= _flag(zero & (decoded ^ reference == U32(0x80000000)), 1 << 8)
    counts |= _flag(product == reference, 1 << 16)
    if group.cast is not None:
        counts |= _flag(_to_bf16(_bits(group.cast * level, U32)) == reference, 1 << 24)
    off = _float(decoded) - _float(reference)
    error = off * (group.unit * F32(2 ** (ERROR_BITS // 2)))
    error = error * error
    norm = _float(reference) * (group.unit * F32(2 ** (NORM_BITS // 2)))
    divisor = jnp.where(magnitude < U32(TINY << 16), group.peak, _float(magnitude))
    relative = _bits(off / divisor, U32) & MAGNITUDE
    terms = (counts, _fixed(error), _fixed(norm * norm), _bits(error, U32), relative)
    if not certify:
        return terms
    # Level 0 divides by zero: an end of infinity or NaN, whose bits are beyond every finite one,
    # so a value that is not 0 leaves the interval empty. A value of 0 has no lower end.
    lo, hi = (_bits(end, U32) for end in interval_ends(magnitude, jnp.abs(level)))
    return *terms, U32(1) << nibble, jnp.where(zero, U32(0), lo), hi


def _fixed(x):
    """rint of 0 <= x <= 2^22, with `MAGIC_BITS` still added."""
    return _bits(x + MAGIC, U32)


_COMBINE = (lax.add, lax.add, lax.add, lax.max, lax.max, lax.bitwise_or, lax.max, lax.min)
_START = (*(U32(0),) * 7, INFINITE)


def _combine(a, b):
    return tuple(f(x, y) for f, x, y in zip(_COMBINE, a, b, strict=False))


def _per_group(rows, ratio):
    """The largest of the rows of each group; integers."""
    return rows if ratio == 1 else lax.reduce(rows.reshape(-1, ratio), U32(0), lax.max, (1,))


@functools.partial(jax.jit, static_argnames=("size", "scale_dtype"))
def compare_words(words, packed, scale, *, size, scale_dtype):
    """Compare one block of whole groups of `size` values with a build: `Sums`.

    `words: uint32[rows, n]`, `packed: uint8[rows, n]`, `scale: f32[groups]`. Groups of 32 are
    certified by their stored levels.
    """
    ratio, certify = size // words.shape[1] // 2, size == GROUP
    spread = lambda x: jnp.repeat(x, ratio) if ratio > 1 else x  # noqa: E731
    magnitude = jnp.maximum((words << U32(16)) & U32(0x7FFF0000), words & U32(0x7FFF0000))
    peak = _float(_per_group(lax.reduce(magnitude, U32(0), lax.max, (1,)), ratio))
    absolute = jnp.abs(scale)
    # By its bits: XLA on a CPU flushes a denormal peak to zero.
    zero = _bits(peak, U32) == U32(0)
    normal = (absolute >= SMALL) & (absolute <= LARGE) & (peak <= LARGE) & ((peak >= SMALL) | zero)

    power = _float(_bits(peak, U32) & INFINITE)
    # At most 2^115, for a group of zeros: any error there is beyond the fixed point.
    unit = _float(jnp.minimum(U32(254 << 23) - _bits(power, U32), U32(242 << 23)))
    cast = None if scale_dtype == "bfloat16" else _float(_to_bf16(_bits(scale, U32)))
    parts = (scale, cast, unit, jnp.where(zero, F32(1), peak))
    group = _Group(*(p if p is None else spread(p)[:, None] for p in parts))
    low, high = (
        _terms(reference, nibble, group, certify)
        for reference, nibble in zip(
            (words << U32(16), words & U32(0xFFFF0000)), _nibbles(packed), strict=True
        )
    )
    rows = lax.reduce(_combine(low, high), _START[: len(low)], _combine, (1,))
    counts, error, norm, worst, largest = rows[:5]

    normal &= _float(_per_group(worst, ratio)) < FIXED_END
    keep = spread(normal)
    whole = _whole(counts, ratio, size)
    codes = _peak_code(peak, scale) | _flag(whole, WHOLE)
    codes |= _flag(_rounded(scale, scale_dtype) & ~whole, ROUNDED)
    if certify:
        seen, lo, hi = rows[5:]
        near = _float(largest) < F32(0.5)
        sure, off = _proof(seen, lo, hi, scale, zero, near, scale_dtype)
        codes |= _flag(off & ~whole, WRONG) | _flag(~sure, UNSURE)
    return Sums(
        codes=jnp.where(normal, codes, U32(ODD)).astype(jnp.uint16),
        counts=jnp.where(keep, counts, U32(0)),
        error=error - _excess(words),
        norm=norm - _excess(words),
        power=jnp.where(keep, spread(power), F32(0)),
        largest=_float(jnp.where(keep, largest, U32(0))),
    )


def _excess(words):
    """What `_fixed` adds to the sum of a row."""
    return U32(2 * words.shape[1] * MAGIC_BITS % 2**32)


def _whole(counts, ratio, size):
    """Groups whose every value comes back, bit for bit or as the other zero."""
    same = (counts & U32(0xFF)) + ((counts >> U32(8)) & U32(0xFF))
    return (same if ratio == 1 else same.reshape(-1, ratio).sum(1)) == U32(size)


_ZERO = 1 << 8


def _seen(*levels):
    """The bits of some levels of either sign."""
    return sum({1 << (8 + q) for level in levels for q in (level, -level) if q < LEVELS})


# Where the peak's level is the one that `repack.kernel` finds: (level, others of which one must
# be there, for with zeros, peaks and their halves alone a smaller level fits as well).
_TOPS = (
    (8, None),
    (7, _seen(1, 2, 3, 4, 5, 6)),
    (6, _seen(1, 2, 4, 5)),
    (5, _seen(1, 2, 3, 4)),
    (4, None),
)


def _proof(seen, lo, hi, scale, zero, near, scale_dtype):
    """Whether the stored levels are a grid of the reference, and whether the scale is off it.

    `near`: no value is off by half or more, so none has the wrong sign.
    """
    top, found = jnp.zeros_like(scale), jnp.zeros_like(zero)
    for level, others in _TOPS:
        here = ~found & (seen & U32(_seen(level)) != U32(0))
        fits = here if others is None else here & (seen & U32(others) != U32(0))
        top, found = jnp.where(fits, F32(level), top), found | here
    lo, hi = _float(lo), _float(hi)
    sure = (lo <= hi) & (top > F32(0)) & (scale > F32(0)) & near & ~zero
    _, step, _ = trained_step(lo, hi)
    off = sure & _step_off(scale, top, step, top, scale_dtype)
    return sure | (zero & (seen == U32(_ZERO))), off


def _rounded(scale, scale_dtype):
    """Whether a float32 scale is a number of a 16-bit dtype."""
    if scale_dtype == "float32":
        return _bits(scale, U32) & U32(0x1FFF) == U32(0)
    return jnp.zeros(scale.shape, bool)


def _step_off(scale, top, step, level, scale_dtype):
    """`exact.step_off`: whether scale * top differs from step * level by more than the dtype."""
    bits = _bits(scale, U32)
    most = jnp.where(bits & U32(0x1FFF) == U32(0), I32(STEP_ULPS >> 3), I32(0))
    most = jnp.where(bits & U32(0xFFFF) == U32(0), I32(STEP_ULPS), most)
    ours, trained = jnp.abs(scale) * top, step * level
    far = jnp.abs(_bits(ours, I32) - _bits(trained, I32)) > most
    if scale_dtype == "float16":
        far &= jnp.abs(ours - trained) > F32(HALF_UNIT) * top
    return far


def _peak_code(peak, scale):
    """Entry of the level histogram, with flags for max/7.5 and a negative scale."""
    absolute = jnp.abs(scale)
    target = _bits(peak / F32(7.5), I32)
    some = peak > F32(0)
    near = some & (jnp.abs(_bits(absolute, I32) - target) <= I32(ONE_ULP))
    ratio = peak / absolute
    level = _bits(jnp.minimum(ratio, F32(100)) + MAGIC, U32) - U32(MAGIC_BITS)
    whole = jnp.abs(ratio - level.astype(F32)) <= F32(ON_LEVEL)
    whole &= (level >= U32(1)) & (level <= U32(LEVELS))
    entry = jnp.where(some, jnp.where(whole, level, U32(BETWEEN)), U32(0))
    return entry | _flag(near, MAX_7_5) | _flag(scale < F32(0), NEGATIVE)


@jax.jit
def decode_words(packed, scale):
    """bf16(f32(scale) * level) of `packed: uint8[groups, n]`, `scale: f32[groups]`: the bits of
    two columns in each of uint32[groups, n]; a NaN stays one."""
    low, high = (_with_nan(_bits(scale[:, None] * _level(n), U32)) for n in _nibbles(packed))
    return (low >> U32(16)) | high


def _with_nan(bits):
    """Rounded to bfloat16, where rounding the bits of a NaN could give an infinity or a zero."""
    nan = bits & MAGNITUDE > INFINITE
    return jnp.where(nan, U32(0x7FC00000), _to_bf16(bits))


@functools.partial(jax.jit, static_argnames="scale_dtype")
def recovered_words(words, packed, scale, *, scale_dtype):
    """The same groups of 32 against the grid recovered from the reference: bool[groups] each.

    Whether it is proved, whether the levels are others (no multiple of it), and whether the scale
    is off though they are not; the last also where every value comes back.
    """
    block = recover_words(words, scale_dtype="float32")
    proved = (block.status == np.uint8(Status.CERTIFIED)) | (block.status == np.uint8(Status.ZERO))
    ours, theirs = (tuple(map(_level, _nibbles(p))) for p in (packed, block.packed))
    top = _bits(jnp.maximum(jnp.abs(ours[0]), jnp.abs(ours[1])), U32)
    top = _float(lax.reduce(top, U32(0), lax.max, (1,)))
    trained = block.peak.astype(F32)
    signed = jnp.where(scale < F32(0), -trained, trained)[:, None]
    unlike = sum(_flag(a * signed != b * top[:, None]) for a, b in zip(ours, theirs, strict=True))
    unlike = lax.reduce(unlike, U32(0), lax.add, (1,))
    differ = ((unlike != U32(0)) | ((top == F32(0)) != (trained == F32(0)))) & proved
    off = _step_off(scale, top, block.step, trained, scale_dtype)
    return proved, differ, off & ~differ & (trained > F32(0)) & proved
