"""Blocks of a build against the reference, value by value.

`kernel` compares a block in one jitted function on the CPU. Groups of extreme size (a peak or a
scale outside 2^-40..2^40, which no weights have) and damaged ones go through
`exact.tally_numpy`, which defines every figure and against which the tests hold the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np

from ..checkpoint.reader import aligned_empty
from ..repack.grid import GROUP, Status, cpu, recover_block
from ..repack.packing import SCALE_DTYPES
from .exact import Certified, as_float32, tally_numpy
from .kernel import (
    CODES,
    ENTRY,
    ERROR_BITS,
    MAX_7_5,
    NEGATIVE,
    NORM_BITS,
    ODD,
    ROUNDED,
    UNSURE,
    WHOLE,
    WRONG,
    Sums,
    compare_words,
    recovered_words,
)
from .tally import BETWEEN, Tally

BLOCK_VALUES = 1 << 22
"""Values in a block, the only compiled shape of a group size: 8 MiB of reference."""

RECOVERED = 4096
"""Groups of the compiled shape in which grids are recovered."""

COUNTS = ("identical", "negative_zeros", "unrounded", "cast")
"""What the fields of `Sums.counts` are."""


@dataclass(frozen=True, slots=True)
class Compared:
    """Some groups: the sums, and the indices of the wrong ones (levels, step, not finite)."""

    tally: Tally
    wrong: np.ndarray


def block_groups(size: int) -> int:
    """Groups of a size in a block; whole groups of 32 as well."""
    together = GROUP // math.gcd(size, GROUP)
    return max(together, BLOCK_VALUES // size // together * together)


class Block:
    """Memory for one block of groups, filled and compared again and again.

    `bits: uint16[groups, size]` of the bf16 reference, `packed: uint8[groups, size/2]`, the bytes
    of the words, `scale: [groups]` in bfloat16, float16 or float32.
    """

    def __init__(self, size: int, scale_dtype: str) -> None:
        dtype = SCALE_DTYPES[scale_dtype]
        self.size, self.scale_dtype, self.groups = size, scale_dtype, block_groups(size)
        sizes = (2 * size, size // 2, dtype.itemsize, 4)
        buffers = [aligned_empty(self.groups * n) for n in sizes]
        self.bits = buffers[0].view(np.uint16).reshape(self.groups, size)
        self.packed = buffers[1].reshape(self.groups, size // 2)
        self.scale = buffers[2].view(dtype)
        self._step = buffers[3].view(np.float32)

    def compare(self, parts: Sequence[slice], *, certify: bool) -> list[Compared]:
        """Compare the groups that the arrays hold, each part on its own.

        `certify`: hold the levels against the grid of groups of 32 too; rows are whole ones, and
        parts as well. What no part covers is computed for nothing.
        """
        self._step[:] = as_float32(self.scale)
        row = math.gcd(self.size, GROUP)
        arrays = [
            self.bits.reshape(-1, row).view("<u4"),
            self.packed.reshape(-1, row // 2),
            self._step,
        ]
        # numpy arrays as they are: `device_put` of each costs a tenth of a block.
        with jax.default_device(cpu()):
            found = compare_words(*arrays, size=self.size, scale_dtype=self.scale_dtype)
        sums = Sums(*map(np.asarray, found))
        return [self._compared(part, sums, certify=certify) for part in parts]

    def _compared(self, part: slice, sums: Sums, *, certify: bool) -> Compared:
        codes = sums.codes[part]
        tally = self._sum(part, sums)
        wrong = codes & WRONG != 0
        odd = np.flatnonzero(codes & ODD)
        if certify and self.size == GROUP:
            unsure = np.flatnonzero(codes & UNSURE)
            sure = len(codes) - len(unsure) - len(odd)
            held, wrong[unsure] = self._recovered(part.start + unsure, codes[unsure] & WHOLE != 0)
            tally += replace(held, compared=held.compared + sure)
        elif certify:
            proved = _certified(self.bits[part].reshape(-1, GROUP)).proved
            tally += Tally(uncertified=int(np.count_nonzero(~proved)))
        if odd.size:
            rest, wrong[odd] = self._odd(part.start + odd, certify=certify)
            tally += rest
        return Compared(tally, np.flatnonzero(wrong))

    def _sum(self, part: slice, sums: Sums) -> Tally:
        """The sums of all groups of a part that are not odd."""
        histogram = np.bincount(sums.codes[part], minlength=CODES)[:ODD]
        peaks = histogram.reshape(-1, ENTRY).sum(0).tolist()[: BETWEEN + 1]
        flagged = lambda flag: int(histogram.reshape(-1, 2, flag)[:, 1].sum())  # noqa: E731
        ratio = len(sums.power) // self.groups
        rows = slice(part.start * ratio, part.stop * ratio)
        fields = COUNTS if self.scale_dtype != "bfloat16" else COUNTS[:3]
        counts = {f: _sum_field(sums.counts[rows], i) for i, f in enumerate(fields)}
        counts.setdefault("cast", counts["identical"])
        squared = np.square(sums.power[rows], dtype=np.float64)
        # Not a dot product: BLAS would start its threads.
        weigh = lambda x: float(np.einsum("i,i", x, squared))  # noqa: E731
        return Tally(
            **counts,
            values=sum(peaks) * self.size,
            groups=sum(peaks),
            zero_groups=peaks[0],
            max_7_5=flagged(MAX_7_5),
            peak_levels=tuple(peaks),
            negative_scales=flagged(NEGATIVE),
            step_off=flagged(WRONG),
            rounded_steps=flagged(ROUNDED),
            error=weigh(sums.error[rows]) / 2**ERROR_BITS,
            norm=weigh(sums.norm[rows]) / 2**NORM_BITS,
            largest=float(sums.largest[rows].max(initial=0)),
        )

    def _recovered(self, rows: np.ndarray, whole: np.ndarray) -> tuple[Tally, np.ndarray]:
        """Groups that the stored levels do not prove, by the grid of the reference itself."""
        wrong = np.zeros(len(rows), bool)
        tally = Tally()
        for start in range(0, len(rows), RECOVERED):
            part = slice(start, start + RECOVERED)
            taken = _padded(self.bits[rows[part]], self.packed[rows[part]], self._step[rows[part]])
            with jax.default_device(cpu()):
                found = recovered_words(*taken, scale_dtype=self.scale_dtype)
            proved, differ, off = (np.asarray(x)[: len(wrong[part])] for x in found)
            off = off & ~whole[part]
            wrong[part] = differ | off
            compared = int(np.count_nonzero(proved))
            tally += Tally(
                compared=compared,
                uncertified=len(proved) - compared,
                levels_differ=int(np.count_nonzero(differ)),
                step_off=int(np.count_nonzero(off)),
            )
        return tally, wrong

    def _odd(self, rows: np.ndarray, *, certify: bool) -> tuple[Tally, np.ndarray]:
        certified = None
        if certify and self.size == GROUP:
            certified = _certified(self.bits[rows])
        tally, wrong = tally_numpy(self.bits[rows], self.packed[rows], self.scale[rows], certified)
        if certified is not None:
            proved = int(np.count_nonzero(certified.proved))
            tally = replace(tally, compared=proved, uncertified=len(rows) - proved)
        return tally, wrong


def _sum_field(counts: np.ndarray, number: int) -> int:
    """The sum of one of the four fields of `Sums.counts`."""
    field = (counts >> np.uint32(8 * number)) & np.uint32(0xFF)
    return int(np.add.reduce(field, dtype=np.uint32))


def _certified(bits: np.ndarray) -> Certified:
    """The grid of `bits: uint16[groups, 32]`."""
    result = recover_block(bits, "float32")
    proved = (result.status == Status.CERTIFIED) | (result.status == Status.ZERO)
    return Certified(result.packed, result.peak, result.step, proved)


def _padded(bits: np.ndarray, packed: np.ndarray, step: np.ndarray) -> list[np.ndarray]:
    """Groups filled up to `RECOVERED` with zeros on level 0."""
    fills = ((bits.view("<u4"), 0), (packed, 0x88), (step, 1))
    rest = RECOVERED - len(step)
    return [
        np.concatenate([a, np.full((rest, *a.shape[1:]), fill, a.dtype)]) if rest else a
        for a, fill in fills
    ]
