"""Forms of a packed linear on the device, and the arithmetic of each.

All hold levels -8..7 and one scale for each group of inputs (32 in every known build). `Words` is
the file's form; `Levels` is laid out for a matrix unit; `lanes.py` has the form of a CPU.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array

PER_WORD = 8
TILE = 256  # inputs whose group sums one pass of the matrix unit forms


@functools.partial(jax.tree_util.register_dataclass, data_fields=["words", "scale"], meta_fields=[])
@dataclass(frozen=True)
class Words:
    """words uint32[out, in/8], nibble i of word j is column 8j+i plus 8; scale [out, in/32]."""

    words: Array
    scale: Array


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["levels", "scale"], meta_fields=[]
)
@dataclass(frozen=True)
class Levels:
    """levels int4[tiles, tile, out] (the input dim cut in tiles), scale [tiles, groups, out]."""

    levels: Array
    scale: Array


def decode(w: Words) -> Array:
    """The weights that packed words stand for, bf16(f32(scale) * level): bf16[..., out, in]."""
    grouped = unpacked(w.words).astype(jnp.float32).reshape(*w.scale.shape, -1)
    values = w.scale.astype(jnp.float32)[..., None] * grouped  # [..., in/32, 32]
    # XLA may drop a cast to bfloat16 and back; it may not drop reduce_precision.
    values = lax.reduce_precision(values, exponent_bits=8, mantissa_bits=7)
    return values.astype(jnp.bfloat16).reshape(*w.scale.shape[:-1], -1)


def unpacked(words: Array) -> Array:
    """uint32[..., in/8] -> int32[..., in/8, 8]. Shifts of int8 would saturate on a TPU."""
    nibbles = (words[..., None] >> jnp.arange(0, 32, 4, dtype=jnp.uint32)) & jnp.uint32(15)
    return nibbles.astype(jnp.int32) - 8


@functools.partial(jax.jit, static_argnames="shards")
def to_levels(w: Words, shards: int = 1) -> Levels:
    """Lay words out for a matrix unit; `shards` is over how many devices the inputs are cut."""
    out, width = w.words.shape[0], w.words.shape[1] * PER_WORD
    tile = math.gcd(width // shards, TILE)
    group = width // w.scale.shape[1]
    levels = jnp.moveaxis(unpacked(w.words).astype(jnp.int4), 0, -1)  # [in/8, 8, out]
    return Levels(
        levels.reshape(width // tile, tile, out),
        w.scale.T.reshape(width // tile, tile // group, out),
    )


def times_levels(x: Array, w: Levels) -> Array:
    """A few rows x [R, in] times `w`: float32[R, out].

    A row becomes `groups` rows, each with one group's inputs and zeros; one matmul with a tile's
    levels then gives all its group sums, and the scales follow.
    """
    tiles, tile = w.levels.shape[:2]
    groups = w.scale.shape[1]
    x = x.reshape(-1, tiles, groups, 1, tile // groups)  # [R, tiles, groups, 1, group]
    apart = (x * jnp.eye(groups, dtype=x.dtype)[..., None]).reshape(-1, tiles, groups, tile)
    # Levels are cast right at the matmul, where XLA fuses the cast.
    sums = jnp.einsum(
        "rtgk,tkn->trgn", apart, w.levels.astype(x.dtype), preferred_element_type=jnp.float32,
        precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
    )  # [tiles, R, groups, out]  # fmt: skip
    return jnp.sum(sums * w.scale.astype(jnp.float32)[:, None], axis=(0, 2))


def scaled_levels(w: Levels, dtype: jnp.dtype) -> Array:
    """The weights [in, out], scaled in float32 and rounded to `dtype`: for many rows."""
    tiles, tile, out = w.levels.shape
    groups = w.scale.shape[1]
    levels = w.levels.reshape(tiles, groups, tile // groups, out).astype(jnp.float32)
    weights = (levels * w.scale.astype(jnp.float32)[:, :, None]).astype(dtype)
    return weights.reshape(tiles * tile, out)
