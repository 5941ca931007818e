"""Recovery in numpy for groups whose peak is below 2^-110, where XLA on a CPU flushes to zero.

Near bfloat16's denormals a rounding error is no longer small against a level, so a level cannot
be read off a ratio. Instead every step that could matter is tried: for each peak level the steps
are cut at every point where some level's decoded value changes, and each cut and each piece
between two cuts is decoded. That is exact for every group, normal ones too, and about a thousand
times slower than the kernel.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .kernel import Status
from .packing import SCALE_DTYPES, pack

CHUNK = 128
"""Groups searched at once; bounds the tables to about 30 MB."""


class TinyBlock(NamedTuple):
    """As `kernel.Block`, in numpy, with one row per group instead of totals."""

    packed: np.ndarray  # uint8[groups, 16]
    scale: np.ndarray  # bits, uint16[groups] or uint32[groups]
    status: np.ndarray  # uint8[groups]
    peak: np.ndarray  # uint8[groups]
    lo: np.ndarray  # float32[groups]
    hi: np.ndarray  # float32[groups]
    step: np.ndarray  # float32[groups]
    exact_bf16: np.ndarray  # bool[groups]
    exact_f16: np.ndarray  # bool[groups]
    identical: np.ndarray  # int64[groups], of 32, bit for bit


def recover_tiny(bits: np.ndarray, scale_dtype: str) -> TinyBlock:
    """Recover `bits: uint16[groups, 32]`, finite and not all zero, with `scale_dtype` scales."""
    blocks = [_recover_chunk(bits[i : i + CHUNK], scale_dtype) for i in range(0, len(bits), CHUNK)]
    return TinyBlock(*(np.concatenate(field) for field in zip(*blocks, strict=True)))


def _recover_chunk(bits: np.ndarray, scale_dtype: str) -> TinyBlock:
    magnitude, negative = bits & np.uint16(0x7FFF), bits >= np.uint16(0x8000)
    step, level = _search(magnitude, negative)
    found = step > 0
    flipped = np.zeros(len(bits), bool)
    flipped[~found] = _search(magnitude[~found], ~negative[~found])[0] > 0
    lo, hi = _interval(magnitude, level)
    mid = np.where(found, lo + 0.5 * (hi - lo), 1).astype(np.float32)
    mid = np.where(found & (_count(mid, level, magnitude) < 32), step, mid)
    nearest = _round(mid, "bfloat16")
    exact_bf16, exact_f16 = (
        _count(_round(mid, name), level, magnitude) == 32 for name in ("bfloat16", "float16")
    )
    step = np.where(exact_bf16, nearest, mid)
    scale = step if scale_dtype == "float32" else _choose(mid, level, magnitude, scale_dtype)
    identical = _count(scale, level, magnitude) - (bits == 0x8000).sum(1)
    signed = np.where(negative, -level, level).astype(np.int8)
    status = np.where(flipped, Status.NEEDS_NEGATIVE_STEP, Status.OFF_GRID)
    return TinyBlock(
        packed=pack(np.where(found[:, None], signed, 0)).view(np.uint8),
        scale=_bits(scale, scale_dtype),
        status=np.where(found, Status.CERTIFIED, status).astype(np.uint8),
        peak=level.max(1).astype(np.uint8),
        lo=lo.astype(np.float32),
        hi=hi.astype(np.float32),
        step=step,
        exact_bf16=exact_bf16,
        exact_f16=exact_f16,
        identical=identical,
    )


def _search(magnitude: np.ndarray, negative: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A step that reproduces each group, and the levels' magnitudes; step 0 where none does."""
    step = np.zeros(len(magnitude), np.float32)
    level = np.zeros(magnitude.shape, np.int64)
    for peak in range(8, 0, -1):
        left = np.flatnonzero(step == 0)
        steps = _candidates(magnitude[left].max(1), peak)
        table = _decode(steps[..., None], np.arange(peak + 1))
        hit = table[:, :, None, :] == magnitude[left][:, None, :, None]
        if peak == 8:
            hit[..., 8] &= negative[left][:, None, :]
        fits = hit.any(-1).all(-1)
        good = fits.any(1)
        first = fits.argmax(1)[good]
        step[left[good]] = steps[good, first]
        level[left[good]] = hit[good, first].argmax(-1)
    return step, level


def _candidates(top: np.ndarray, peak: int) -> np.ndarray:
    """Steps that put `top` (bf16 bits) on `peak`, one for each way the lower levels can round."""
    lo, hi = (_value((top.astype(np.int64) << 16) + end) / peak for end in (-0x8000, 0x8000))
    k = np.arange(1, peak + 1)[:, None]
    first = (lo[:, None, None] * k).astype(np.float32).view(np.int32).astype(np.int64) >> 16
    # At most three midpoints of bfloat16 lie between k * lo and k * hi, one ulp of the peak.
    cuts = _value(((first + np.arange(4)) << 16) + 0x8000) / k
    cuts = np.clip(cuts.reshape(len(top), 4 * peak), lo[:, None], hi[:, None])
    cuts = np.sort(np.concatenate([lo[:, None], cuts, hi[:, None]], axis=1), axis=1)
    return np.concatenate([0.5 * (cuts[:, 1:] + cuts[:, :-1]), cuts], axis=1).astype(np.float32)


def _interval(magnitude: np.ndarray, level: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ends of the steps that round back to every value: 0 and inf where all levels are 0."""
    wide = magnitude.astype(np.int64) << 16
    used = level > 0
    lo = _value(np.where(used, wide - 0x8000, 0)) / np.maximum(level, 1)
    hi = np.where(used, _value(wide + 0x8000) / np.maximum(level, 1), np.inf)
    return lo.max(1), hi.min(1)


def _choose(
    mid: np.ndarray, level: np.ndarray, magnitude: np.ndarray, scale_dtype: str
) -> np.ndarray:
    """The scale of a 16-bit dtype, by the rule of `qatpack.repack.grid`."""
    nearest = _bits(_round(mid, scale_dtype), scale_dtype).astype(np.int64)
    value = _value(magnitude.astype(np.int64) << 16)
    top = 0x7F7F if scale_dtype == "bfloat16" else 0x7BFF  # the largest finite number
    bits = [np.clip(nearest + move, 1, top).astype(np.uint16) for move in (0, -1, 1)]
    scales = [b.view(SCALE_DTYPES[scale_dtype]).astype(np.float32) for b in bits]
    missed = np.stack([32 - _count(scale, level, magnitude) for scale in scales])
    unit = value.max(1, keepdims=True)  # keeps the squares in range
    offsets = np.stack([(s[:, None].astype(float) * level - value) / unit for s in scales])
    order = np.lexsort(((offsets**2).sum(2), missed), axis=0)[0]
    return np.choose(np.where(missed[0] == 0, 0, order), scales)


def _count(scale: np.ndarray, level: np.ndarray, magnitude: np.ndarray) -> np.ndarray:
    return (_decode(scale[:, None], level) == magnitude).sum(1)


def _decode(scale: np.ndarray, level: np.ndarray) -> np.ndarray:
    """Bits of bf16(f32(scale * level)), nearest even, for non-negative numbers: uint16."""
    # The float64 product is exact, so one rounding to float32 is a float32 multiplication.
    bits = (scale.astype(float) * level).astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _value(wide: np.ndarray) -> np.ndarray:
    """float64 of float32 bits held in int64."""
    return wide.astype(np.uint32).view(np.float32).astype(float)


def _round(scale: np.ndarray, scale_dtype: str) -> np.ndarray:
    """Nearest positive finite number of a dtype, as float32."""
    low, top = (2.0**-24, 65504.0) if scale_dtype == "float16" else (2.0**-133, 3.3895314e38)
    clipped = np.clip(scale, np.float32(low), np.float32(top))
    return clipped.astype(SCALE_DTYPES[scale_dtype]).astype(np.float32)


def _bits(scale: np.ndarray, scale_dtype: str) -> np.ndarray:
    rounded = scale.astype(SCALE_DTYPES[scale_dtype])
    return rounded.view(np.uint32 if scale_dtype == "float32" else np.uint16)
