"""The language model head alone: hidden states to logits, without the rest of the model."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..checkpoint.folder import Checkpoint
from ..checkpoint.naming import text_prefix
from ..checkpoint.reader import TensorReader
from . import divergence
from .gemma4 import model, packed
from .gemma4.config import Config

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


def load_head(folder: Path, config: Config, dtype: np.dtype[Any]) -> Head:
    """Read a checkpoint's head as `dtype`: `lm_head`, or the embedding it is tied to."""
    checkpoint = Checkpoint.open(folder)
    prefix = text_prefix(checkpoint.tensors)
    module = f"{prefix}embed_tokens" if config.tied else "lm_head"
    with TensorReader() as reader:
        read = lambda name: jax.device_put(reader.read(checkpoint[f"{module}.{name}"]))  # noqa: E731
        if f"{module}.weight_packed" not in checkpoint.tensors:
            return Head(jax.block_until_ready(read("weight").astype(dtype)), config)
        words = packed.Words(read("weight_packed").view(jnp.uint32), read("weight_scale"))
        weights = jax.jit(packed.decode)(words).astype(dtype)
        return Head(jax.block_until_ready(weights), config)


def load_heads(folders: list[tuple[Path, Config, np.dtype[Any]]]) -> list[Head]:
    """The head of each checkpoint; those with the same bytes as the first share its memory."""
    first, *others = folders
    heads = [load_head(*first)]
    for folder, config, dtype in others:
        head = load_head(folder, config, dtype)
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
