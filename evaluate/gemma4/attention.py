"""Attention by positions: one function for prompts, rings and full caches."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .linear import dot

Array = jax.Array
QUERIES = 512  # queries of a long prompt are taken this many at a time, so that scores stay small


class Keys(NamedTuple):
    """Keys and values, each [B, K, S, D], at positions int32[B, S]; negative for none."""

    k: Array
    v: Array
    at: Array


def attend(q: Array, q_at: Array, pieces: Sequence[Keys], window: int | None) -> Array:
    """Attention of q [B, N, T, D] over all keys of `pieces`: [B, N, T, D], in q's dtype.

    A query at position p (`q_at` int32[B, T], -1 for none) sees the keys at positions 0..p, and of
    those only the last `window` when one is given. In a prompt (T > 1) there is one piece, and its
    keys stand in the order of the queries.
    """
    length, keys = q.shape[2], pieces[0].k.shape[2]
    if length <= QUERIES or length % QUERIES or length != keys:
        return _attend(q, q_at, pieces, window)
    k, v, k_at = pieces[0]
    # Of a sliding layer, a block of queries sees its own keys and the window before them.
    span = keys if window is None else min(keys, QUERIES * (1 + -(-window // QUERIES)))

    def block(index: Array) -> Array:
        start = index * QUERIES
        first = jnp.maximum(start + QUERIES - span, 0)
        take = lambda x, at, size, axis: jax.lax.dynamic_slice_in_dim(x, at, size, axis)  # noqa: E731
        seen = Keys(take(k, first, span, 2), take(v, first, span, 2), take(k_at, first, span, 1))
        return _attend(take(q, start, QUERIES, 2), take(q_at, start, QUERIES, 1), [seen], window)

    blocks = jax.lax.map(block, jnp.arange(length // QUERIES))  # [blocks, B, N, QUERIES, D]
    return jnp.moveaxis(blocks, 0, 2).reshape(q.shape)


def _attend(q: Array, q_at: Array, pieces: Sequence[Keys], window: int | None) -> Array:
    batch, heads, length, width = q.shape
    grouped = q.reshape(batch, pieces[0].k.shape[1], -1, length, width)  # [B, K, G, T, D]
    scores = [_scores(grouped, q_at, x, window) for x in pieces]  # each [B, K, G, T, S]
    # One softmax over all pieces, which are never joined: they lie in different memory.
    peak = functools.reduce(jnp.maximum, [x.max(axis=-1, keepdims=True) for x in scores])
    shares = [jnp.exp(x - peak) for x in scores]
    total = sum(x.sum(axis=-1, keepdims=True) for x in shares)
    out = sum(
        dot("bkgts,bksd->bkgtd", (share / total).astype(q.dtype), x.v)
        for share, x in zip(shares, pieces, strict=True)
    )
    return jnp.asarray(out).astype(q.dtype).reshape(batch, heads, length, width)


def _scores(grouped: Array, q_at: Array, keys: Keys, window: int | None) -> Array:
    scores = dot("bkgtd,bksd->bkgts", grouped, keys.k)
    seen = visible(q_at, keys.at, window)[:, None, None]  # [B, 1, 1, T, S]
    # A finite bound: a row that sees nothing (padding) must not become NaN.
    return jnp.where(seen, scores, -1e30)


def visible(q_at: Array, k_at: Array, window: int | None) -> Array:
    """Which keys a query sees: bool[B, T, S]."""
    q_at, k_at = q_at[:, :, None], k_at[:, None, :]
    seen = (k_at >= 0) & (k_at <= q_at)
    return seen if window is None else seen & (q_at - k_at < window)
