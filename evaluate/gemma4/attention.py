"""Attention by positions: one function for prompts, rings and full caches."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .linear import dot

Array = jax.Array
QUERIES = 512  # queries of a long prompt are taken this many at a time, so that scores stay small


def attend(q: Array, k: Array, v: Array, q_at: Array, k_at: Array, window: int | None) -> Array:
    """Attention of q [B, N, T, D] over k, v [B, K, S, D]: [B, N, T, D], in q's dtype.

    A query at position p sees the keys at positions 0..p, and of those only the last `window`
    when one is given. `q_at` int32[B, T] and `k_at` int32[B, S] are positions, -1 for none. In a
    prompt (T > 1) keys stand in the order of the queries.
    """
    length, keys = q.shape[2], k.shape[2]
    if length <= QUERIES or length % QUERIES or length != keys:
        return _attend(q, k, v, q_at, k_at, window)
    # Of a sliding layer, a block of queries sees its own keys and the window before them.
    span = keys if window is None else min(keys, QUERIES * (1 + -(-window // QUERIES)))

    def block(index: Array) -> Array:
        start = index * QUERIES
        first = jnp.maximum(start + QUERIES - span, 0)
        take = lambda x, at, size, axis: jax.lax.dynamic_slice_in_dim(x, at, size, axis)  # noqa: E731
        return _attend(
            take(q, start, QUERIES, 2), take(k, first, span, 2), take(v, first, span, 2),
            take(q_at, start, QUERIES, 1), take(k_at, first, span, 1), window,
        )  # fmt: skip

    blocks = jax.lax.map(block, jnp.arange(length // QUERIES))  # [blocks, B, N, QUERIES, D]
    return jnp.moveaxis(blocks, 0, 2).reshape(q.shape)


def _attend(q: Array, k: Array, v: Array, q_at: Array, k_at: Array, window: int | None) -> Array:
    batch, heads, length, width = q.shape
    grouped = q.reshape(batch, k.shape[1], -1, length, width)  # [B, K, G, T, D]
    scores = dot("bkgtd,bksd->bkgts", grouped, k)
    seen = visible(q_at, k_at, window)[:, None, None]  # [B, 1, 1, T, S]
    # A finite bound: a row that sees nothing (padding) must not become NaN.
    shares = jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1)
    out = dot("bkgts,bksd->bkgtd", shares.astype(q.dtype), v)
    return out.astype(q.dtype).reshape(batch, heads, length, width)


def visible(q_at: Array, k_at: Array, window: int | None) -> Array:
    """Which keys a query sees: bool[B, T, S]."""
    q_at, k_at = q_at[:, :, None], k_at[:, None, :]
    seen = (k_at >= 0) & (k_at <= q_at)
    return seen if window is None else seen & (q_at - k_at < window)
