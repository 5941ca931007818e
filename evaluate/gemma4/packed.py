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
LANES = 128  # outputs side by side in a vector register
TILE = 256  # inputs whose group sums one pass of the matrix unit forms


@functools.partial(jax.tree_util.register_dataclass, data_fields=["words", "scale"], meta_fields=[])
@dataclass(frozen=True)
class Words:
    """words uint32[out, in/8], nibble i of word j is column 8j+i plus 8; scale [out, in/32]."""

    words: Array
    scale: Array


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["levels", "scale", "exact"], meta_fields=[]
)
@dataclass(frozen=True)
class Levels:
    """levels int4[tiles, tile, out] (the input dim cut in tiles), scale [tiles, groups, out].

    `exact` are the scales for rows looked up, where products take narrower ones.
    """

    levels: Array
    scale: Array
    exact: Array | None = None


def decode(w: Words) -> Array:
    """The weights that packed words stand for, bf16(f32(scale) * level): bf16[..., out, in]."""
    return _decoded(unpacked(w.words).reshape(*w.scale.shape, -1), w.scale)


def _decoded(levels: Array, scale: Array) -> Array:
    """Levels [..., groups, group] and scales [..., groups]: bf16[..., in]."""
    values = scale.astype(jnp.float32)[..., None] * levels.astype(jnp.float32)
    # XLA may drop a cast to bfloat16 and back; it may not drop reduce_precision.
    values = lax.reduce_precision(values, exponent_bits=8, mantissa_bits=7)
    return values.astype(jnp.bfloat16).reshape(*scale.shape[:-1], -1)


def unpacked(words: Array) -> Array:
    """uint32[..., in/8] -> int32[..., in/8, 8]. Shifts of int8 would saturate on a TPU."""
    nibbles = (words[..., None] >> jnp.arange(0, 32, 4, dtype=jnp.uint32)) & jnp.uint32(15)
    return nibbles.astype(jnp.int32) - 8


def tiled(w: Words, shards: int = 1) -> bool:
    """Whether `to_levels` can lay words out: every tile of inputs holds whole groups."""
    width = w.words.shape[1] * PER_WORD
    return math.gcd(width // shards, TILE) % (width // w.scale.shape[1]) == 0


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


def narrowed(w: Levels, *, lookups: bool = True) -> Levels:
    """Float16 scales for the product, half the bytes of float32 ones, kept for lookups if asked.

    Their error, 2^-11 at most, is an eighth of bfloat16's. Scales outside float16's normal range
    leave `w` as it is.
    """
    size = jnp.abs(w.scale)
    least, most = jnp.min(jnp.where(size > 0, size, 1)), jnp.max(size)
    limits = jnp.finfo(jnp.float16)
    if w.scale.dtype != jnp.float32 or least < limits.tiny or most > limits.max:
        return w
    return Levels(w.levels, w.scale.astype(jnp.float16), w.scale if lookups else None)


def times_levels(x: Array, w: Levels) -> Array:
    """A few rows x [R, in] times `w`: float32[R, out], all sums in float32.

    A row becomes `groups` rows, each with one group's inputs and zeros; one matmul with a tile's
    levels, which are exact in bfloat16, then gives all its group sums, and the scales follow.
    """
    tiles, tile, _ = w.levels.shape
    groups = w.scale.shape[1]
    # Without the barrier a TPU cuts the norm's weights into tiles too, and waits for HBM for each;
    # and it makes float32 scales long before it needs them, for which the on-chip memory is small.
    x, scale = lax.optimization_barrier((x, w.scale))
    x = x.reshape(-1, tiles, tile).swapaxes(0, 1)[:, None]  # [tiles, 1, R, tile]
    # Masked, not reshaped to the groups: 32 inputs would fill a quarter of a vector register.
    own = jnp.arange(tile) // (tile // groups) == jnp.arange(groups)[:, None]
    apart = jnp.where(own[:, None], x, 0)  # [tiles, groups, R, tile]
    # Levels are cast right at the matmul, where XLA fuses the cast.
    sums = jnp.einsum(
        "tgrk,tkn->tgrn", apart, w.levels.astype(x.dtype), preferred_element_type=jnp.float32,
        precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
    )  # fmt: skip
    return jnp.sum(sums * scale.astype(jnp.float32)[:, :, None], axis=(0, 1))


def scaled_levels(w: Levels, dtype: jnp.dtype) -> Array:
    """The weights [in, out], scaled and rounded once to `dtype`: for many rows."""
    tiles, groups, out = w.scale.shape
    # Of a bfloat16 scale the product with a level rounds once in bfloat16 too, and is cheaper.
    wide = jnp.promote_types(w.scale.dtype, jnp.bfloat16)
    levels = w.levels.reshape(-1, out).astype(wide)
    each = (tiles, groups, w.levels.shape[1] // groups, out)
    scale = jnp.broadcast_to(w.scale.astype(wide)[:, :, None], each).reshape(-1, out)
    return (levels * scale).astype(dtype)


def rows_of_levels(w: Levels, ids: Array) -> Array:
    """The weights of outputs `ids`, bf16(f32(scale) * level): bf16[*ids.shape, in].

    One row at a time, out of the register's width of outputs around it: for a gather XLA would
    first turn the whole table, on every call.
    """
    out = w.levels.shape[-1]
    wide = min(LANES, out)

    def row(at: Array) -> Array:
        start = jnp.minimum(at // LANES * LANES, out - wide)
        own = jnp.arange(wide) == at - start

        def take(table: Array) -> Array:  # [tiles, n, out] -> float32[tiles, n]
            block = lax.dynamic_slice_in_dim(table, start, wide, axis=2)
            return jnp.sum(jnp.where(own, block.astype(jnp.float32), 0), axis=2)

        scale = take(w.scale if w.exact is None else w.exact)
        return _decoded(take(w.levels).reshape(*scale.shape, -1), scale).reshape(-1)

    found = lax.map(row, jnp.clip(ids.reshape(-1), 0, out - 1))
    return found.reshape(*ids.shape, -1)
