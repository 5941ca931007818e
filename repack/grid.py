"""Recover the trained grid: a positive step and levels -8..7 per group of 32, proved by value.

A group is certified exactly when some step reproduces all its values as bf16(f32(step * level)):

1. The largest magnitude sits on a level m; a wrong m leaves some value 0.077 or more from a
   level, the right one at most 0.052 (both sides rounded to 8 bits).
2. Each value then allows an interval of steps, and the group allows their intersection.
3. The float32 step is the bfloat16 number nearest the centre if that lies inside, else the
   centre. Decoding all 32 values with it is the proof; nothing is certified by tolerance.

The stored scale, by dtype. float32: that step, so every value comes back. bfloat16 and float16:
the number nearest the centre if it lies inside; else, of the two numbers around the interval,
the one that reproduces more values, then the one with the smaller squared error of
scale * level, then the lower. No other number of the dtype reproduces more values. A float16
scale stays in 2^-24..65504, and what does not come back is not counted as identical.

All of it runs on the CPU, also where an accelerator is the default device: the proof needs
correctly rounded float32 division and products, which a TPU does not promise.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

import jax
import numpy as np

from ..checkpoint.errors import QatpackError
from .kernel import EXACT_BF16, EXACT_F16, GROUP, TIED, TINY, Block, Status, recover_words
from .packing import BF16, SCALE_DTYPES, unpack
from .probe import describe, share_certified
from .tiny import TinyBlock, recover_tiny

__all__ = [
    "BLOCK_GROUPS",
    "GROUP",
    "BlockResult",
    "Counts",
    "Grid",
    "Pending",
    "Status",
    "describe_group",
    "dispatch",
    "recover",
    "recover_block",
    "share_certified",
]

BLOCK_GROUPS = 32768
"""Groups in the largest compiled block, 2 MiB: blocks fit a core's cache with their output."""

TAIL_GROUPS = 4096
"""Groups in the only other compiled shape, which a tail is padded to a multiple of."""


@dataclass(frozen=True)
class Counts:
    """What was proved, summed over groups; add two to get both together."""

    groups: int = 0
    zero: int = 0
    certified: int = 0
    exact_bf16: int = 0
    """Certified groups of which a bfloat16 step reproduces all values."""
    exact_f16: int = 0
    exact_f32: int = 0
    off_grid: int = 0
    needs_negative_step: int = 0
    non_finite: int = 0
    tiny: int = 0
    """Groups with a peak below 2^-110, recovered in numpy; any status but zero and non-finite."""
    values: int = 0
    identical: int = 0
    """Values of zero and certified groups that come back bit for bit from the stored scale."""
    negative_zeros: int = 0
    """Values -0.0 of the same groups: they come back as 0.0, equal but not identical."""
    peaks: tuple[int, ...] = (0,) * 9
    """Certified groups by the largest |level| stored, 0..8; trained peaks of 1 to 4 are stored as
    their doubles, of the values alone nobody could tell, unless a positive one would be +8."""

    def __add__(self, other: Counts) -> Counts:
        """Both together."""
        sums = {
            f.name: getattr(self, f.name) + getattr(other, f.name)
            for f in fields(self)
            if f.name != "peaks"
        }
        peaks = tuple(a + b for a, b in zip(self.peaks, other.peaks, strict=True))
        return Counts(**sums, peaks=peaks)

    @property
    def refused(self) -> int:
        """Groups that no positive step reproduces."""
        return self.off_grid + self.needs_negative_step + self.non_finite

    def to_json(self) -> dict[str, int | list[int]]:
        """A dict that `json.dumps` takes."""
        return asdict(self) | {"peaks": list(self.peaks)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Counts:
        """The inverse of `to_json`."""
        return cls(**{**data, "peaks": tuple(data["peaks"])})


class BlockResult(NamedTuple):
    """One recovered block. Arrays may be read-only views of XLA's buffers."""

    packed: np.ndarray
    """uint8[groups, 16]: the bytes of the little-endian int32 words, level + 8 in each nibble."""
    scale: np.ndarray
    """[groups] of the scale dtype; of no meaning where the status refuses."""
    status: np.ndarray
    """uint8[groups] of `Status`."""
    peak: np.ndarray
    """uint8[groups]: the level of the largest magnitude, 0 for a zero group."""
    lo: np.ndarray
    """float32[groups]: the steps that reproduce the group are lo..hi, the ends to 2^-17."""
    hi: np.ndarray
    step: np.ndarray
    """float32[groups]: the proved step."""
    counts: Counts


@dataclass(frozen=True)
class Pending:
    """Blocks that XLA is computing. The input must stay untouched until `result` returns."""

    bits: np.ndarray
    scale_dtype: str
    pieces: list[Block]

    def result(self) -> BlockResult:
        """Wait; recover the tiny groups and settle ties, if there are any."""
        block = _joined(self.pieces, len(self.bits))
        rows = np.flatnonzero(block.flags & TIED)
        if rows.size:
            scale = _settle(self.bits[rows], block.packed[rows], block.scale[rows], self.dtype)
            block = block._replace(scale=_replaced(block.scale, rows, scale))
        counts = _counts(block)
        rows = np.flatnonzero(block.status == TINY)
        if rows.size:
            tiny = recover_tiny(self.bits[rows], self.scale_dtype)
            arrays = zip(block[: len(SHARED)], tiny[: len(SHARED)], strict=True)
            fixed = (_replaced(a, rows, b) for a, b in arrays)
            block = Block._make([*fixed, *block[len(SHARED) :]])
            counts += _tiny_counts(tiny, self.bits[rows])
        result = BlockResult._make([*block[: len(SHARED)], counts])
        return result._replace(scale=result.scale.view(self.dtype))

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the scales."""
        return SCALE_DTYPES[self.scale_dtype]


def dispatch(bits: np.ndarray, scale_dtype: str = "bfloat16") -> Pending:
    """Start recovering `bits: uint16[groups, 32]`, the bf16 bits of any number of groups.

    Returns at once; the caller may read the next block meanwhile. A buffer aligned to 64 bytes
    is used where it lies, without a copy, so it must not be written to before
    `Pending.result` has returned. `scale_dtype` is bfloat16, float16 or float32.

    Raises ValueError for another shape or dtype, QatpackError where JAX has no CPU backend.
    """
    if scale_dtype not in SCALE_DTYPES:
        raise ValueError(f"scale dtype {scale_dtype!r}: {', '.join(SCALE_DTYPES)} are possible")
    if bits.dtype != np.uint16 or bits.ndim != 2 or bits.shape[1] != GROUP:
        raise ValueError(f"need uint16[groups, {GROUP}], got {bits.dtype}{list(bits.shape)}")
    bits = np.ascontiguousarray(bits)
    words = bits.view("<u4")
    pieces = [
        recover_words(jax.device_put(piece, cpu()), scale_dtype=scale_dtype)
        for piece in _pieces(words)
    ]
    return Pending(bits, scale_dtype, pieces)


def recover_block(bits: np.ndarray, scale_dtype: str = "bfloat16") -> BlockResult:
    """Recover `bits: uint16[groups, 32]`: `dispatch` and wait."""
    return dispatch(bits, scale_dtype).result()


def describe_group(bits: np.ndarray) -> str:
    """One group, `bits: uint16[32]`, in words: "needs a negative step: its peak 0.5 lies ..."."""
    return describe(bits, Status(recover_block(bits.reshape(1, GROUP)).status[0]))


@dataclass(frozen=True)
class Grid:
    """The recovered grid of a whole array of shape [..., in].

    Invariants, for groups with status CERTIFIED or ZERO: `decode(packed, step)` equals the input
    (-0.0 as 0.0); step is positive and finite, lo <= step <= hi. For others, lo, hi and step are
    NaN and the levels mean nothing.
    """

    packed: np.ndarray  # int32[..., in/8]
    scale: np.ndarray  # [..., in/32] of the scale dtype
    status: np.ndarray  # uint8[..., in/32]
    peak: np.ndarray  # uint8[..., in/32]
    lo: np.ndarray  # float32[..., in/32]
    hi: np.ndarray  # float32[..., in/32]
    step: np.ndarray  # float32[..., in/32]
    counts: Counts

    @functools.cached_property
    def levels(self) -> np.ndarray:
        """int8[..., in], each in -8..7."""
        return unpack(self.packed)


def recover(w: np.ndarray, scale_dtype: str = "bfloat16") -> Grid:
    """Recover `w: bfloat16[..., in]` (or its bits, uint16), with `in` a multiple of 32.

    Groups run along the last axis. Never raises for values: look at `counts.refused`.

    Raises ValueError for another shape or dtype.
    """
    if w.dtype not in (BF16, np.uint16):
        raise ValueError(f"need bfloat16 or its bits as uint16, got {w.dtype}")
    if w.ndim == 0 or w.shape[-1] % GROUP:
        raise ValueError(f"shape {list(w.shape)}: the last axis must be a multiple of {GROUP}")
    shape = (*w.shape[:-1], w.shape[-1] // GROUP)
    bits = np.ascontiguousarray(w).view(np.uint16).reshape(-1, GROUP)
    starts = range(0, max(len(bits), 1), BLOCK_GROUPS)
    blocks = [recover_block(bits[i : i + BLOCK_GROUPS], scale_dtype) for i in starts]
    counts = sum((block.counts for block in blocks), Counts())
    joined = (np.concatenate(parts) for parts in zip(*(b[:-1] for b in blocks), strict=True))
    result = BlockResult._make([*joined, counts])
    proved = (result.status == Status.CERTIFIED) | (result.status == Status.ZERO)
    lo, hi, step = (
        np.where(proved, x, np.float32(np.nan)) for x in (result.lo, result.hi, result.step)
    )
    packed = result.packed.view("<i4").reshape(*w.shape[:-1], w.shape[-1] // 8)
    return Grid(
        packed=packed,
        scale=result.scale.reshape(shape),
        status=result.status.reshape(shape),
        peak=result.peak.reshape(shape),
        lo=lo.reshape(shape),
        hi=hi.reshape(shape),
        step=step.reshape(shape),
        counts=counts,
    )


@functools.cache
def cpu() -> Any:
    """The CPU device of this process; raises QatpackError where JAX was told to hide it."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except (RuntimeError, AssertionError) as error:
        raise QatpackError(
            "The grid is proved on the CPU, and JAX has no CPU backend here. Add cpu to "
            "JAX_PLATFORMS (for example JAX_PLATFORMS=tpu,cpu) or unset it."
        ) from error


def _pieces(words: np.ndarray) -> Iterator[np.ndarray]:
    """Cut into the two compiled shapes, the last one padded with zero groups."""
    start = 0
    while start < len(words):
        size = BLOCK_GROUPS if len(words) - start > BLOCK_GROUPS - TAIL_GROUPS else TAIL_GROUPS
        piece = words[start : start + size]
        if len(piece) < size:
            piece = np.concatenate([piece, np.zeros((size - len(piece), GROUP // 2), np.uint32)])
        yield piece
        start += size
    if not len(words):
        yield np.zeros((TAIL_GROUPS, GROUP // 2), np.uint32)


SHARED = BlockResult._fields[:-1]
"""The arrays that `Block`, `TinyBlock` and `BlockResult` have in common, in this order."""


def _joined(pieces: list[Block], groups: int) -> Block:
    """The pieces as one block in numpy, without the padding."""
    blocks = [map(np.asarray, piece) for piece in pieces]
    joined = (x[0] if len(x) == 1 else np.concatenate(x) for x in zip(*blocks, strict=True))
    return Block(*(x[:groups] for x in joined))


def _settle(bits: np.ndarray, packed: np.ndarray, scale: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Bits of the scales: of each and the next number up, the one of smaller squared error.

    With q the levels, w the values and a < b the scales, b is better when
    sum (bq - w)^2 < sum (aq - w)^2, that is when (a + b) sum q^2 < 2 sum qw.
    """
    levels = unpack(packed.view("<i4")).astype(float)
    lower, upper = (x.view(dtype).astype(float) for x in (scale, scale + np.uint16(1)))
    product = (levels * bits.view(BF16).astype(float)).sum(1)
    better = (lower + upper) * (levels**2).sum(1) < 2 * product
    return scale + better.astype(np.uint16)


def _counts(block: Block) -> Counts:
    """Counts of the groups that the kernel handled."""
    # One histogram over all three codes: a pass over each would cost a tenth of the kernel.
    exact = (block.flags & np.uint8(EXACT_BF16 | EXACT_F16)).astype(np.uint16)
    code = block.status + (block.peak << np.uint8(3)) + (exact << np.uint16(7))
    histogram = np.bincount(code, minlength=4 * 16 * 8).reshape(4, 16, 8)
    status = histogram.sum(axis=(0, 1)).tolist()
    certified = histogram[:, :, Status.CERTIFIED]
    by_exact = certified.sum(axis=1).tolist()
    return Counts(
        groups=len(block.status),
        zero=status[Status.ZERO],
        certified=status[Status.CERTIFIED],
        exact_bf16=by_exact[EXACT_BF16] + by_exact[EXACT_BF16 | EXACT_F16],
        exact_f16=by_exact[EXACT_F16] + by_exact[EXACT_BF16 | EXACT_F16],
        exact_f32=status[Status.CERTIFIED],
        off_grid=status[Status.OFF_GRID],
        needs_negative_step=status[Status.NEEDS_NEGATIVE_STEP],
        non_finite=status[Status.NON_FINITE],
        values=GROUP * len(block.status),
        identical=int(block.identical.sum(dtype=np.uint32)),
        negative_zeros=int(block.negative_zeros.sum(dtype=np.uint32)),
        peaks=tuple(certified[:, :9].sum(axis=0).tolist()),
    )


def _tiny_counts(block: TinyBlock, bits: np.ndarray) -> Counts:
    certified = block.status == Status.CERTIFIED
    number = lambda mask: int(mask.sum())  # noqa: E731
    return Counts(
        certified=number(certified),
        exact_bf16=number(certified & block.exact_bf16),
        exact_f16=number(certified & block.exact_f16),
        exact_f32=number(certified),
        off_grid=number(block.status == Status.OFF_GRID),
        needs_negative_step=number(block.status == Status.NEEDS_NEGATIVE_STEP),
        tiny=len(bits),
        identical=int(block.identical[certified].sum()),
        negative_zeros=number(bits[certified] == 0x8000),
        peaks=tuple(np.bincount(block.peak[certified], minlength=9).tolist()),
    )


def _replaced(array: np.ndarray, rows: np.ndarray, values: np.ndarray) -> np.ndarray:
    array = array.copy()
    array[rows] = values
    return array
