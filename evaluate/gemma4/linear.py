"""Products with dense and packed weights, and which one runs where: all of it is chosen here.

A linear of the model is an array [out, in], or a packed form of `packed.py` or `lanes.py`.

`exact` decodes a weight to bf16(f32(scale) * level) and multiplies as the dense model does, so that
identical weights give identical logits. `fast` multiplies by the scale after the group sums: closer
to real arithmetic, not bit-equal to the dense model.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from . import lanes, packed
from .lanes import Lanes
from .packed import Levels, Words

Array = jax.Array
Linear = Array | Words | Levels | Lanes
Path = Literal["exact", "fast"]

FEW_ROWS = 8  # up to here a CPU reads the weights as they are stored
BLOCK_ROWS = 32  # up to here group sums on a matrix unit beat scaling every weight


def prepare(w: Words, path: Path, *, platform: str, shards: int = 1) -> Linear:
    """What the device keeps of a packed linear, by path and platform."""
    if path == "exact":
        return w
    # A CPU stores int4 as bytes and unpacks in registers.
    if platform == "cpu":
        return lanes.to_lanes(w)
    # Groups that do not end where tiles do have no such layout.
    return packed.to_levels(w, shards) if packed.tiled(w, shards) else w


def product(x: Array, w: Linear, dtype: Any = None) -> Array:
    """x [..., in] times w [out, in], transposed: [..., out], in x's dtype or the one given."""
    out = _product(x.reshape(-1, x.shape[-1]), w)
    return out.astype(dtype or x.dtype).reshape(*x.shape[:-1], -1)


def _product(x: Array, w: Linear) -> Array:
    """x [R, in] -> float32[R, out]."""
    match w:
        case Words():
            # The barrier keeps the decoding out of the matmul: it is then the dense model's own.
            decoded = packed.decode(w).astype(x.dtype)
            return _dense(x, lax.optimization_barrier(decoded))
        case Levels():
            few = len(x) <= BLOCK_ROWS
            return packed.times_levels(x, w) if few else _many(x, packed.scaled_levels(w, x.dtype))
        case Lanes():
            few = len(x) <= FEW_ROWS
            return lanes.times_lanes(x, w) if few else _many(x, lanes.scaled_lanes(w, x.dtype))
        case _:
            return _dense(x, w)


def _many(x: Array, weights: Array) -> Array:
    return dot("rk,kn->rn", x, weights)


def _dense(x: Array, w: Array) -> Array:
    if len(x) > 1 or w.dtype != jnp.bfloat16:
        return dot("rk,nk->rn", x, w)
    return lax.platform_dependent(x, w, cpu=_one_row, default=functools.partial(dot, "rk,nk->rn"))


def _one_row(x: Array, w: Array) -> Array:
    """XLA's bf16 matmul on a CPU first copies w to float32; this sum reads it once."""
    return jnp.sum(w.astype(jnp.float32) * x.astype(jnp.float32), axis=1)[None]


def dot(spec: str, a: Array, b: Array) -> Array:
    """An einsum that accumulates in float32 and returns it; float32 operands keep their bits.

    A TPU multiplies float32 in bfloat16 passes unless told otherwise.
    """
    exact = a.dtype == jnp.float32
    precision = lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT
    return jnp.einsum(spec, a, b, precision=precision, preferred_element_type=jnp.float32)


def rows(table: Linear, ids: Array, dtype: Any) -> Array:
    """Rows `ids` of a table [V, width]: [*ids.shape, width]. Only those rows are read.

    A packed table, in whichever form, gives bf16(f32(scale) * level).
    """
    match table:
        case Words():
            words = Words(*(a.at[ids].get(mode="clip") for a in (table.words, table.scale)))
            return packed.decode(words).astype(dtype)
        case Levels():
            return packed.rows_of_levels(table, ids).astype(dtype)
        case Lanes():
            return packed.decode(lanes.rows_of_lanes(table, ids)).astype(dtype)
        case _:
            taken = lax.platform_dependent(table, ids, cpu=_bits_of_rows, default=_rows)
            return taken.astype(dtype)


def _rows(table: Array, ids: Array) -> Array:
    return table.at[ids].get(mode="clip")


def _bits_of_rows(table: Array, ids: Array) -> Array:
    """XLA on a CPU takes rows of a bf16 table from a float32 copy of it, and then reads that copy
    for the tied head as well: three times the bytes. Rows of integers are taken as they are."""
    if table.dtype != jnp.bfloat16:
        return _rows(table, ids)
    return lax.bitcast_convert_type(
        _rows(lax.bitcast_convert_type(table, jnp.uint16), ids), jnp.bfloat16
    )
