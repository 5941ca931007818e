"""Choosing the next token from logits."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["temperature", "top_p"], meta_fields=["top_k"]
)
@dataclass(frozen=True)
class Sampling:
    """Temperature, then top-k (0: all tokens), then top-p, in transformers' order.

    Only `top_k` shapes the computation; the other two may change without a new compilation.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


def choose(logits: Array, key: Array, sampling: Sampling | None) -> Array:
    """One token a row, int32[B], from logits float32[B, V]; the likeliest when `sampling` is None.

    Top-p keeps the smallest set of tokens whose probability reaches top_p, at least one.
    """
    if sampling is None:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    best, ids = lax.top_k(logits / sampling.temperature, sampling.top_k or logits.shape[-1])
    shares = jax.nn.softmax(best, axis=-1)
    before = jnp.cumsum(shares, axis=-1) - shares
    kept = jnp.where((before < sampling.top_p) | (before == 0), best, -jnp.inf)
    pick = jax.random.categorical(key, kept)
    return jnp.take_along_axis(ids, pick[:, None], axis=-1)[:, 0].astype(jnp.int32)
