"""Products with dense and packed weights."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array


def dot(spec: str, a: Array, b: Array) -> Array:
    """An einsum that accumulates in float32 and returns it; float32 operands keep their bits.

    A TPU multiplies float32 in bfloat16 passes unless told otherwise.
    """
    exact = a.dtype == jnp.float32
    precision = lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT
    return jnp.einsum(spec, a, b, precision=precision, preferred_element_type=jnp.float32)


def product(x: Array, w: Any, dtype: Any = None) -> Array:
    """x [..., in] times w [out, in], transposed: [..., out], in x's dtype or the one given."""
    return dot("...k,nk->...n", x, w).astype(dtype or x.dtype)


def rows(table: Any, ids: Array, dtype: Any) -> Array:
    """Rows `ids` of a table [V, width]: [*ids.shape, width]. Only those rows are read."""
    return table.at[ids].get(mode="clip").astype(dtype)
