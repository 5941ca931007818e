"""The form of a packed linear for the vector unit of a CPU, and its arithmetic."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from .packed import PER_WORD, Words, unpacked

Array = jax.Array

WIDE = 16384  # lanes of one step: enough work to hide the step's overhead


@functools.partial(jax.tree_util.register_dataclass, data_fields=["words", "scale"], meta_fields=[])
@dataclass(frozen=True)
class Lanes:
    """words uint32[steps, 4, groups, out], scale [steps, groups, out]: a step reads its groups."""

    words: Array
    scale: Array


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
    levels = unpacked(w.words).astype(jnp.float32)  # [steps, 4, groups, out, 8]
    weights = levels * w.scale.astype(jnp.float32)[:, None, :, :, None]
    return weights.astype(dtype).transpose(0, 2, 1, 4, 3).reshape(-1, out)
