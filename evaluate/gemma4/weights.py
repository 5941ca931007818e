"""From the checkpoint's flat names to the pytree that the model reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from .config import Config, tensor_shapes
from .packed import Levels


def assemble(config: Config, leaf: Callable[[str], Any]) -> dict[str, Any]:
    """The model's pytree; `leaf` gives the array (or packed linear) of a tensor's name.

    `layers.3.self_attn.q_proj.weight` becomes `["layers"][3]["q_proj"]`.
    """
    layers: list[dict[str, Any]] = [{} for _ in config.layers]
    top: dict[str, Any] = {}
    for name in tensor_shapes(config):
        parts = name.removesuffix(".weight").split(".")
        place = layers[int(parts[1])] if parts[0] == "layers" else top
        place[parts[-1]] = leaf(name)
    return top | {"layers": tuple(layers)}


def is_inner_norm(name: str) -> bool:
    """Whether `name` is a norm inside the model; the last one's dtype is the activations' own.

    Norms are computed in float32. Held so, a TPU need not cast each of them in each step, which
    costs little but the wait for HBM before it.
    """
    return name.endswith("norm.weight") and name != "norm.weight"


def looked_up(weights: dict[str, Any], config: Config) -> list[Any]:
    """Tables, and scales kept for lookups, of which a step reads a few rows only."""
    tables = ["embed_tokens_per_layer"] + ([] if config.tied else ["embed_tokens"])
    forms = jax.tree.leaves(weights, is_leaf=lambda x: isinstance(x, Levels))
    exact = [x.exact for x in forms if isinstance(x, Levels) and x.exact is not None]
    return [weights[name] for name in tables if name in weights] + exact
