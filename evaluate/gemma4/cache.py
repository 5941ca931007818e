"""Keys and values of the tokens so far: whole for full layers, a ring for sliding ones.

A cache is a tuple over the layers: {"k", "v"}, each [B, K, S, D], or None where a layer shares
another's. S is the length of the whole run for a full layer and at most the window for a sliding
one. Position p stands in slot p mod S, so that one formula tells what a slot holds, for both.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from .config import SLIDING, Config, Layer

Array = jax.Array
Cache = tuple[dict[str, Array] | None, ...]


def slots(layer: Layer, length: int, config: Config) -> int:
    """S of one layer for a run of at most `length` tokens."""
    return min(length, config.window) if layer.kind == SLIDING else length


def fill(
    kv: tuple[tuple[Array, Array] | None, ...], counts: Array, length: int, *, config: Config
) -> Cache:
    """The cache after a prompt: `kv` from `model.forward`, rows padded on the right.

    Args:
        kv: for each layer (k, v), each [B, K, T, D], or None.
        counts: int32[B], tokens of each row.
        length: tokens the whole run may have, at least T.
        config: what model it is.
    """
    return tuple(
        None
        if pair is None
        else {
            n: _fill(x, counts, slots(layer, length, config))
            for n, x in zip("kv", pair, strict=True)
        }
        for pair, layer in zip(kv, config.layers, strict=True)
    )


def _fill(x: Array, counts: Array, size: int) -> Array:
    """[B, K, T, D] -> [B, K, size, D], the last tokens of each row in their slots."""
    length = x.shape[2]
    if length <= size:
        return jnp.pad(x, ((0, 0), (0, 0), (0, size - length), (0, 0)))
    source = jnp.maximum(held(counts - 1, size), 0)  # [B, size]
    return jnp.take_along_axis(x, source[:, None, :, None], axis=2)


def held(last: Array, size: int) -> Array:
    """The position in each slot when `last` int32[B] was written last: [B, size], < 0 for none."""
    return last[:, None] - (last[:, None] - jnp.arange(size)) % size


def write(layer: dict[str, Array], k: Array, v: Array, positions: Array) -> dict[str, Array]:
    """Put one token a row, k and v [B, K, 1, D], at `positions` int32[B]."""
    slot = positions % layer["k"].shape[2]
    return {name: _put(layer[name], new, slot) for name, new in (("k", k), ("v", v))}


def _put(cache: Array, new: Array, slot: Array) -> Array:
    # One in-place update a row: a scatter of rows is slow on a TPU.
    for row in range(cache.shape[0]):
        cache = lax.dynamic_update_slice(cache, new[row : row + 1], (row, 0, slot[row], 0))
    return cache
