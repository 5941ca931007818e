"""How weights are cut over a mesh; XLA's partitioner does the rest with the same model code.

Tensor parallelism: q, k, v, gate and up by their outputs (heads, MLP width), o and down by their
inputs, tables by the vocabulary. K/V heads that do not divide stay whole on every device, as do
norms and the small per-layer projections.
"""

from __future__ import annotations

from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..devices import AXIS
from .config import Config

_BY_OUTPUT = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_BY_INPUT = ("o_proj", "down_proj")


def cut_axis(name: str, config: Config, shards: int) -> int | None:
    """Which axis of the linear or table `name`, [out, in], is cut: 0, 1, or None for neither."""
    parts = name.split(".")
    module = next((p for p in parts if p.endswith("_proj")), parts[0])
    if parts[0] != "layers":
        by_vocabulary = parts[0] in ("embed_tokens", "embed_tokens_per_layer", "lm_head")
        return 0 if by_vocabulary and config.vocab % shards == 0 else None
    layer = config.layers[int(parts[1])]
    count = {"k_proj": layer.kv_heads, "v_proj": layer.kv_heads}.get(module, config.heads)
    if module in ("gate_proj", "up_proj", "down_proj"):
        # Whole groups of 32 on every device, for the packed form.
        count = layer.intermediate // 32
    if module not in (*_BY_OUTPUT, *_BY_INPUT) or count % shards:
        return None
    return 0 if module in _BY_OUTPUT else 1


def weight_sharding(mesh: Mesh, name: str, shape: tuple[int, ...], config: Config) -> NamedSharding:
    """Where one stored array goes: a dense weight, packed words or scales, each [out, ...]."""
    axis = cut_axis(name, config, mesh.size) if len(shape) == 2 else None
    spec: list[Any] = [None] * len(shape)
    if axis is not None and shape[axis] % mesh.size == 0:
        spec[axis] = AXIS
    return NamedSharding(mesh, PartitionSpec(*spec))


def levels_sharding(mesh: Mesh, name: str, tiles: int, config: Config) -> NamedSharding:
    """Where levels [tiles, tile, out] and their scales [tiles, groups, out] go."""
    axis = cut_axis(name, config, mesh.size)
    if axis == 0:
        return NamedSharding(mesh, PartitionSpec(None, None, AXIS))
    if axis == 1 and tiles % mesh.size == 0:
        return NamedSharding(mesh, PartitionSpec(AXIS))
    return NamedSharding(mesh, PartitionSpec())


def cache_sharding(mesh: Mesh, kv_heads: int) -> NamedSharding:
    """Where keys and values [B, K, S, D] go: by heads where they divide."""
    divides = kv_heads % mesh.size == 0
    return NamedSharding(mesh, PartitionSpec(None, AXIS) if divides else PartitionSpec())
