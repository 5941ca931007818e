"""Levels to packed words and back, and what a packed tensor decodes to.

The layout is compressed-tensors' `pack-quantized` with 4 bits: nibble i (bits 4i..4i+3) of word
j is column 8j+i and stores level + 8. A little-endian word is four bytes, and byte t of a row
holds columns 2t (low nibble) and 2t+1. Everything is integer: a word sent through float32 keeps
24 of its 32 bits.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

BF16 = np.dtype(ml_dtypes.bfloat16)
SCALE_DTYPES = {"bfloat16": BF16, "float16": np.dtype("<f2"), "float32": np.dtype("<f4")}
"""The dtypes a stored scale may have, by safetensors' long name."""

GROUP = 32
"""Values in a group, along the last axis."""

PER_WORD = 8


def pack(levels: np.ndarray) -> np.ndarray:
    """Pack `levels: int8[..., in]`, each in -8..7, into `int32[..., in / 8]`.

    Raises ValueError for another dtype, a width that is not a multiple of 8, or a level outside
    -8..7 (never clipped: a clipped level is a wrong weight).
    """
    _require_dtype(levels, np.int8, "levels")
    if levels.ndim == 0 or levels.shape[-1] % PER_WORD:
        raise ValueError(f"levels of shape {levels.shape}: the last axis must be a multiple of 8")
    if levels.size and not (levels.min() >= -8 and levels.max() <= 7):
        raise ValueError(f"levels span {levels.min()}..{levels.max()}: 4 bits hold -8..7")
    nibbles = (levels + np.int8(8)).view(np.uint8)
    packed = nibbles[..., 0::2] | (nibbles[..., 1::2] << np.uint8(4))
    return np.ascontiguousarray(packed).view("<i4")


def unpack(packed: np.ndarray) -> np.ndarray:
    """Unpack `packed: int32[..., in / 8]` into levels, `int8[..., in]`.

    Raises ValueError for another dtype.
    """
    _require_dtype(packed, np.int32, "packed words")
    if packed.ndim == 0:
        raise ValueError("packed words need at least one axis")
    data = np.ascontiguousarray(packed.astype("<i4", copy=False)).view(np.uint8)
    nibbles = np.empty((*data.shape[:-1], 2 * data.shape[-1]), np.uint8)
    np.bitwise_and(data, np.uint8(15), out=nibbles[..., 0::2])
    np.right_shift(data, np.uint8(4), out=nibbles[..., 1::2])
    return nibbles.view(np.int8) - np.int8(8)


def decode(
    packed: np.ndarray,
    scale: np.ndarray,
    group_size: int = 32,
    *,
    scale_as_bf16: bool = False,
) -> np.ndarray:
    """The weights a reader sees: `bfloat16[..., in]`.

    `packed: int32[..., in / 8]`, `scale: [..., in / group_size]` in bfloat16, float16 or
    float32. A value is bf16(f32(scale) * level), rounded to nearest even: a reader that
    multiplies in float32. With `scale_as_bf16` the scale is first rounded to bfloat16, as
    transformers and vLLM do when they cast it to the model's dtype; for a bfloat16 scale the two
    agree, because a product of 8 and 3 significant bits is exact in float32.

    Raises ValueError for other dtypes or shapes that do not match.
    """
    levels = unpack(packed)
    if scale.dtype not in SCALE_DTYPES.values():
        raise ValueError(f"scale has dtype {scale.dtype}: {', '.join(SCALE_DTYPES)} are possible")
    if (*scale.shape[:-1], scale.shape[-1] * group_size) != levels.shape:
        raise ValueError(
            f"scale of shape {scale.shape} with groups of {group_size} does not match "
            f"{levels.shape} levels"
        )
    with np.errstate(over="ignore"):  # a product beyond bfloat16 decodes to inf, as in a reader
        step = (scale.astype(BF16) if scale_as_bf16 else scale).astype(np.float32)
        grouped = levels.reshape(*scale.shape, group_size).astype(np.float32)
        return (step[..., None] * grouped).astype(BF16).reshape(levels.shape)


def _require_dtype(array: np.ndarray, dtype: type, what: str) -> None:
    if array.dtype != dtype:
        raise ValueError(f"{what} must be {np.dtype(dtype)}, got {array.dtype}")
