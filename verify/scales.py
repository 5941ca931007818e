"""Stored scales on their own, for builds that are not compared with a reference."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..checkpoint.reader import TensorReader
from .build import Build
from .exact import as_float32

BLOCK_VALUES = 1 << 20


@dataclass(frozen=True)
class Scales:
    """How many scales of a build are not positive and finite."""

    negative: int = 0
    zero: int = 0
    non_finite: int = 0


def scan_scales(build: Build) -> Scales:
    """Read every scale of the build."""
    negative = zero = non_finite = 0
    with TensorReader() as reader:
        for tensor in build.packed.values():
            step = max(1, BLOCK_VALUES // tensor.scale.columns)
            for start in range(0, tensor.rows, step):
                stop = min(start + step, tensor.rows)
                scale = as_float32(reader.read_rows(tensor.scale, start, stop))
                negative += int(np.count_nonzero(scale < 0))
                zero += int(np.count_nonzero(scale == 0))
                non_finite += int(np.count_nonzero(~np.isfinite(scale)))
    return Scales(negative, zero, non_finite)
