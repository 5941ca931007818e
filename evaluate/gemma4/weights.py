"""From the checkpoint's flat names to the pytree that the model reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .config import Config, tensor_shapes


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
