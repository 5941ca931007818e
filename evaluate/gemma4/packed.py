"""Forms of a packed linear on the device, and the arithmetic of each.

All hold levels -8..7 and one scale for each group of inputs (32 in every known build). `Words` is
the file's form; `Levels` is laid out for a matrix unit; `Lanes` for the vector unit of a CPU.
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
WIDE = 16384  # lanes of one step on a CPU: enough work to hide the step's overhead


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


@functools.partial(jax.tree_util.register_dataclass, data_fields=["words", "scale"], meta_fields=[])
@dataclass(frozen=True)
class Lanes:
    """words uint32[steps, 4, groups, out], scale [steps, groups, out]: a step reads its groups."""

    words: Array
    scale: Array


def decode(w: Words) -> Array:
    """The weights that packed words stand for, bf16(f32(scale) * level): bf16[..., out, in]."""
    grouped = _levels(w.words).astype(jnp.float32).reshape(*w.scale.shape, -1)
    values = w.scale.astype(jnp.float32)[..., None] * grouped  # [..., in/32, 32]
    # XLA may drop a cast to bfloat16 and back; it may not drop reduce_precision.
    values = lax.reduce_precision(values, exponent_bits=8, mantissa_bits=7)
    return values.astype(jnp.bfloat16).reshape(*w.scale.shape[:-1], -1)


def _levels(words: Array) -> Array:
    """uint32[..., in/8] -> int32[..., in/8, 8]. Shifts of int8 would saturate on a TPU."""
    nibbles = (words[..., None] >> jnp.arange(0, 32, 4, dtype=jnp.uint32)) & jnp.uint32(15)
    return nibbles.astype(jnp.int32) - 8


@functools.partial(jax.jit, static_argnames="shards")
def to_levels(w: Words, shards: int = 1) -> Levels:
    """Lay words out for a matrix unit; `shards` is over how many devices the inputs are cut."""
    out, width = w.words.shape[0], w.words.shape[1] * PER_WORD
    tile = math.gcd(width // shards, TILE)
    group = width // w.scale.shape[1]
    levels = jnp.moveaxis(_levels(w.words).astype(jnp.int4), 0, -1)  # [in/8, 8, out]
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


@jax.jit
def to_lanes(w: Words) -> Lanes:
    """Lay words out for a CPU: outputs along the vector lanes, a few groups of inputs a step."""
    out, count = w.scale.shape
    wide = max(d for d in range(1, count + 1) if count % d == 0 and (d * out <= WIDE or d == 1))
    words = w.words.reshape(out, count // wide, wide, -1)  # [out, steps, groups, 4]
    return Lanes(words.transpose(1, 3, 2, 0), w.scale.T.reshape(count // wide, wide, out))


def times_lanes(x: Array, w: Lanes) -> Array:
    """A few rows x [R, in] times `w`: float32[R, out]; each word is read once, none is unpacked
    to memory."""
    steps, words, groups, out = w.words.shape
    x = x.astype(jnp.float32).reshape(-1, steps, groups, words, PER_WORD)
    x = x.transpose(1, 3, 4, 0, 2)[..., None]  # [steps, words, 8, R, groups, 1]

    def step(total: Array, part: tuple[Array, Array, Array]) -> tuple[Array, None]:
        packed, scale, x = part
        sums = -8 * jnp.sum(x, axis=(0, 1))  # nibbles are level + 8
        for j in range(words):
            for i in range(PER_WORD):
                nibble = (packed[j] >> jnp.uint32(4 * i)) & jnp.uint32(15)
                sums = sums + nibble.astype(jnp.int32).astype(jnp.float32) * x[j, i]
        return total + sums * scale.astype(jnp.float32), None

    total = jnp.zeros((x.shape[3], groups, out), jnp.float32)
    return jnp.sum(lax.scan(step, total, (w.words, w.scale, x))[0], axis=1)


def scaled_lanes(w: Lanes, dtype: jnp.dtype) -> Array:
    """The weights [in, out], scaled in float32 and rounded to `dtype`: for many rows."""
    out = w.words.shape[-1]
    levels = _levels(w.words).astype(jnp.float32)  # [steps, 4, groups, out, 8]
    weights = levels * w.scale.astype(jnp.float32)[:, None, :, :, None]
    return weights.astype(dtype).transpose(0, 2, 1, 4, 3).reshape(-1, out)
