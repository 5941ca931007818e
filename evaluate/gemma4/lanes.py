"""The form of a packed linear for the vector unit of a CPU, and its arithmetic.

A product has to be written such that XLA makes of it one loop over the outputs that reads every
word once, keeps nothing unpacked in memory, and is shared among the cores. With JAX 0.10 that
takes three things, each found in the compiled program:

- Outputs lie along the vector lanes and the 32 inputs of a group are written out, so that the
  compiler sees a plain elementwise loop. A sum over inputs that XLA forms is not vectorised.
- The step from the lanes' group sums to their total is an operation that XLA's library of float32
  kernels (YNNPACK) does not take. Otherwise it takes the multiplications too, and every nibble is
  written out as a float32 first: ten times slower.
- Outputs are cut in pieces whose words stay in a core's cache while several rows pass over them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from .packed import PER_WORD, Words, unpacked

Array = jax.Array

PIECE = 1 << 18  # bytes of words in one piece: half of a common second-level cache
CUTS = 8  # the pieces are a multiple of this where the outputs are, to be cut over a mesh
# Nibble i is masked where it stands, 16^i times too large; the last is shifted down (int32 is
# signed). Inputs are multiplied by these powers of two instead, which is exact.
_UNITS = np.array([16.0**-i for i in range(PER_WORD - 1)] + [1.0], np.float32)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["words", "scale"], meta_fields=[])
@dataclass(frozen=True)
class Lanes:
    """words uint32[pieces, words of a group, groups, wide], scale [pieces, groups, wide].

    Output p * wide + n is lane n of piece p; word j of group g holds, lowest nibble first, the
    levels of inputs 32 g + 8 j ..+7, each plus 8 (4 words a group of 32).
    """

    words: Array
    scale: Array


@jax.jit
def to_lanes(w: Words) -> Lanes:
    """Lay words out for a CPU."""
    out, groups = w.scale.shape
    wide = piece_width(out, w.words.shape[1])
    words = w.words.reshape(out // wide, wide, groups, -1).transpose(0, 3, 2, 1)
    return Lanes(words, w.scale.reshape(out // wide, wide, groups).swapaxes(1, 2))


def piece_width(out: int, words: int) -> int:
    """Outputs of one piece, for a linear of `out` outputs with `words` words each."""
    share = out // CUTS if out % CUTS == 0 else out
    most = max(1, PIECE // (4 * words))
    return max(d for d in range(1, min(share, most) + 1) if share % d == 0)


def times_lanes(x: Array, w: Lanes) -> Array:
    """A few rows x [R, in] times `w`: float32[R, out], all sums in float32.

    Every row unpacks the words anew, so that the time grows with the rows.
    """
    pieces, words, groups, wide = w.words.shape
    x = x.astype(jnp.float32).reshape(-1, groups, words, PER_WORD)
    # Two groups a lane halve the group sums kept; for one row they are few, and it compiles faster.
    parts = 2 if len(x) > 2 and groups % 2 == 0 else 1
    sums = jnp.float32(0)  # [pieces, R, groups / parts, wide]
    for part in range(parts):
        own = slice(part * groups // parts, (part + 1) * groups // parts)
        sums += _group_sums(x[:, own], w.words[:, :, own], w.scale[:, own])
    # Changes nothing, but XLA's library does not know it: see the module.
    sums = jnp.where(sums == sums, sums, jnp.nan)
    return jnp.sum(sums, axis=2).swapaxes(0, 1).reshape(-1, pieces * wide)


def _group_sums(x: Array, words: Array, scale: Array) -> Array:
    """x [R, G, words, 8], words [pieces, words, G, wide], scale [pieces, G, wide]:
    float32[pieces, R, G, wide]."""
    sums = -8 * jnp.sum(x, axis=(2, 3))[None, :, :, None]  # nibbles are level + 8
    x = x * _UNITS
    for j in range(words.shape[1]):
        for i in range(PER_WORD):
            sums += _nibble(words[:, j], i)[:, None] * x[None, :, :, j, i, None]
    return sums * scale.astype(jnp.float32)[:, None]


def _nibble(words: Array, i: int) -> Array:
    """Nibble i of uint32 words over `_UNITS[i]`, as float32."""
    last = i == PER_WORD - 1
    nibble = words >> jnp.uint32(4 * i) if last else words & jnp.uint32(15 << (4 * i))
    return nibble.astype(jnp.int32).astype(jnp.float32)


def scaled_lanes(w: Lanes, dtype: jnp.dtype) -> Array:
    """The weights [in, out], scaled in float32 and rounded to `dtype`: for many rows."""
    levels = unpacked(w.words).astype(jnp.float32)  # [pieces, words, groups, wide, 8]
    weights = (levels * w.scale.astype(jnp.float32)[:, None, :, :, None]).astype(dtype)
    pieces, _, _, wide, _ = weights.shape
    return weights.transpose(2, 1, 4, 0, 3).reshape(-1, pieces * wide)


def rows_of_lanes(w: Lanes, ids: Array) -> Words:
    """The words of outputs `ids`: [*ids.shape, in/8] and scales [*ids.shape, in/32]."""
    pieces, _, _, wide = w.words.shape
    ids = jnp.clip(ids, 0, pieces * wide - 1)
    words = w.words[ids // wide, :, :, ids % wide].swapaxes(-1, -2)  # [..., groups, words]
    return Words(words.reshape(*ids.shape, -1), w.scale[ids // wide, :, ids % wide])
