"""The language model head alone: hidden states to logits, without the rest of the model."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import divergence
from .gemma4 import model
from .gemma4.config import Config
from .gemma4.load import load_head

Array = jax.Array
Scores = tuple[Array, tuple[Array, Array]]


@dataclass(frozen=True)
class Head:
    """weights [V, E] as the model has them (decoded where a build packs them), and its config."""

    weights: Array
    config: Config

    def scores(self, hidden: np.ndarray) -> Scores:
        """Logits float32[P, V] of hidden states [P, E], softcap applied, and their normalizer."""
        logits = _logits(self.weights, jnp.asarray(hidden), config=self.config)
        return logits, divergence.normalizer(logits)


def _load(folder: Path, config: Config, dtype: np.dtype[Any]) -> Head:
    return Head(jax.block_until_ready(load_head(folder, config, dtype)), config)


def load_heads(folders: list[tuple[Path, Config, np.dtype[Any]]]) -> list[Head]:
    """The head of each checkpoint; those with the same bytes as the first share its memory."""
    first, *others = folders
    heads = [_load(*first)]
    for folder, config, dtype in others:
        head = _load(folder, config, dtype)
        same = head.weights.shape == heads[0].weights.shape and _equal(head, heads[0])
        heads.append(Head(heads[0].weights, config) if same else head)
    return heads


def _equal(a: Head, b: Head) -> bool:
    if a.weights.dtype != b.weights.dtype:
        return False
    return bool(_same_bits(a.weights, b.weights))


@jax.jit
def _same_bits(a: Array, b: Array) -> Array:
    """Bits, not values: -0 and NaN count."""
    bits: Any = {2: jnp.uint16, 4: jnp.uint32}[a.dtype.itemsize]
    return jnp.all(a.view(bits) == b.view(bits))


@functools.partial(jax.jit, static_argnames="config")
def _logits(weights: Array, hidden: Array, *, config: Config) -> Array:
    name = "embed_tokens" if config.tied else "lm_head"
    return model.logits({name: weights}, hidden, config=config)
