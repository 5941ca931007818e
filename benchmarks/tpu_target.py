"""A described TPU v5e and the decoder's arguments as shapes on it: what the TPU scripts compile.

Import this before jax: the environment must name the chip before libtpu is loaded.
"""

from __future__ import annotations

import importlib.util
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

# A described chip instead of an attached one; a second process must not trip on the lock file.
os.environ |= {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "JAX_PLATFORMS": "cpu",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_LOG_DIR": "disabled",
}

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from qatpack.evaluate.devices import AXIS
from qatpack.evaluate.gemma4 import cache, generate
from qatpack.evaluate.gemma4.config import Config, read_config, tensor_shapes
from qatpack.evaluate.gemma4.linear import product
from qatpack.evaluate.gemma4.packed import PER_WORD, TILE, Levels, Words
from qatpack.evaluate.gemma4.sharding import (
    cache_sharding,
    cut_axis,
    levels_sharding,
    weight_sharding,
)
from qatpack.evaluate.gemma4.weights import assemble, is_inner_norm, looked_up
from qatpack.repack.packing import GROUP

HBM_BYTES = 16.9e9  # what XLA gives a program on one v5e
BANDWIDTH = 819e9  # bytes/s, v5e data sheet
CONFIGS = ("E2B", "E4B", "12B", "31B")
DATA = Path(__file__).parent.parent / "tests" / "data"


def require_libtpu() -> None:
    """Exit with a sentence where the compiler is not installed."""
    if importlib.util.find_spec("libtpu") is None:
        sys.exit(
            "libtpu, the TPU's compiler, is not installed here: run "
            "`pip install 'jax[tpu]'` (Linux on x86-64, Python 3.12; no TPU is needed)."
        )


def config_of(name: str) -> Config:
    """A model's real config by its name, one of `CONFIGS`."""
    return read_config(DATA / f"{name.lower()}_config.json")


def mesh_of(chips: int) -> Mesh:
    """A described v5e of one chip, or 2x4 of them."""
    name, bounds = {1: ("v5e:1x1", [1, 1, 1]), 8: ("v5e:2x4", [2, 4, 1])}[chips]
    topology = topologies.get_topology_desc(
        topology_name=name, platform="tpu", chips_per_host_bounds=bounds
    )
    return Mesh(np.array(topology.devices), (AXIS,))


def weights_of(
    config: Config, build: str, scale_dtype: Any, mesh: Mesh, *, head: str = "bf16"
) -> dict[str, Any]:
    """The model's pytree as shapes with shardings.

    `build` is bf16, w4a16 (the fast form) or words (the exact one); `head` bf16 or int4.
    """

    head_name = "embed_tokens.weight" if config.tied else "lm_head.weight"

    def leaf(name: str) -> Any:
        shape = tensor_shapes(config)[name]
        linear = name.endswith("_proj.weight") or "per_layer_" in name
        linear &= len(shape) == 2 and not name.startswith("embed")
        if name == head_name and head == "int4":
            held = levels(name, *shape, jnp.float32)
            narrow = jax.ShapeDtypeStruct(
                held.scale.shape, jnp.float16, sharding=held.scale.sharding
            )
            return Levels(held.levels, narrow, held.scale)
        if linear and build == "w4a16":
            return levels(name, *shape, scale_dtype)
        if linear and build == "words":
            return words(name, *shape)
        dtype = jnp.float32 if is_inner_norm(name) else jnp.bfloat16
        return jax.ShapeDtypeStruct(
            shape, dtype, sharding=weight_sharding(mesh, name, shape, config)
        )

    def words(name: str, out: int, width: int) -> Words:
        struct = lambda shape, dtype: jax.ShapeDtypeStruct(  # noqa: E731
            shape, dtype, sharding=weight_sharding(mesh, name, shape, config)
        )
        return Words(
            struct((out, width // PER_WORD), jnp.uint32), struct((out, width // GROUP), scale_dtype)
        )

    def levels(name: str, out: int, width: int, scale_dtype: Any) -> Levels:
        shards = mesh.size if cut_axis(name, config, mesh.size) == 1 else 1
        tile = math.gcd(width // shards, TILE)
        tiles = width // tile
        sharding = levels_sharding(mesh, name, tiles, config)
        return Levels(
            jax.ShapeDtypeStruct((tiles, tile, out), jnp.int4, sharding=sharding),
            jax.ShapeDtypeStruct((tiles, tile // GROUP, out), scale_dtype, sharding=sharding),
        )

    return assemble(config, leaf)


def state_of(config: Config, batch: int, context: int, mesh: Mesh) -> generate.State:
    """The state of `generate.decode` as shapes with shardings; `context` slots in full layers."""
    whole = NamedSharding(mesh, PartitionSpec())

    def layer_cache(index: int) -> Any:
        layer = config.layers[index]
        if not config.owns_kv(index):
            return None
        shape = (batch, layer.kv_heads, cache.slots(layer, context, config), layer.head_dim)
        struct = jax.ShapeDtypeStruct(
            shape, jnp.bfloat16, sharding=cache_sharding(mesh, layer.kv_heads)
        )
        return {"k": struct, "v": struct}

    row = lambda dtype: jax.ShapeDtypeStruct((batch,), dtype, sharding=whole)  # noqa: E731
    key = jax.eval_shape(lambda: jax.random.key(0))
    return generate.State(
        tuple(layer_cache(i) for i in range(len(config.layers))),
        row(jnp.int32), row(jnp.int32), row(jnp.bool_),
        jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=whole),
    )  # fmt: skip


def traced(
    name: str, weights: Any, state: generate.State, config: Config, mesh: Mesh, prompt: int
) -> Any:
    """`decode` (a loop of up to 32 tokens) or `prefill` (of `prompt` tokens), traced."""
    batch = state.token.shape[0]
    context = max(
        (c["k"].shape[2] for c in state.cache if c is not None), default=prompt
    )  # the full layers' slots
    whole = NamedSharding(mesh, PartitionSpec())
    ints = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32, sharding=whole)  # noqa: E731
    if name == "decode":
        return generate.decode.trace(weights, state, ints(), ints(3), None, config=config, chunk=32)
    return generate.prefill.trace(
        weights, ints(batch, prompt), ints(batch), ints(3), state.key, None,
        config=config, cache_length=context,
    )  # fmt: skip


def compiled(traced: Any) -> tuple[Any, float]:
    """The TPU program of what `jax.jit(...).trace` gave, and the seconds it took."""
    start = time.perf_counter()
    program = traced.lower(lowering_platforms=("tpu",)).compile()
    return program, time.perf_counter() - start


def memory(program: Any) -> dict[str, float]:
    """Bytes on one chip."""
    m = program.memory_analysis()
    total = m.argument_size_in_bytes + m.temp_size_in_bytes + m.output_size_in_bytes
    return {
        "argument_bytes": m.argument_size_in_bytes,
        "temp_bytes": m.temp_size_in_bytes,
        "total_bytes": total - m.alias_size_in_bytes,
    }


def step_bytes(weights: dict[str, Any], state: generate.State, config: Config) -> float:
    """Bytes one chip reads a step: all weights but tables that are only looked up, and caches."""
    whole = sum(map(_bytes, jax.tree.leaves((weights, state.cache))))
    return whole - sum(map(_bytes, jax.tree.leaves(looked_up(weights, config))))


def _bytes(x: Any) -> float:
    """On one chip: its piece of what is cut, all of what is not."""
    return math.prod(x.sharding.shard_shape(x.shape)) * (
        0.5 if x.dtype == jnp.int4 else x.dtype.itemsize
    )


def traced_linear(shape: str, build: str, rows: int, mesh: Mesh) -> tuple[Any, float]:
    """One product of `rows` rows with a linear "out,in", traced, and the bytes of the weights."""
    out, width = map(int, shape.split(","))
    whole = NamedSharding(mesh, PartitionSpec())
    struct = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=whole)  # noqa: E731
    weights: Any = struct((out, width), jnp.bfloat16)
    if build == "words":
        weights = Words(
            struct((out, width // PER_WORD), jnp.uint32),
            struct((out, width // GROUP), jnp.bfloat16),
        )
    elif build == "w4a16":
        tile = math.gcd(width, TILE)
        weights = Levels(
            struct((width // tile, tile, out), jnp.int4),
            struct((width // tile, tile // GROUP, out), jnp.bfloat16),
        )
    traced = jax.jit(product).trace(struct((rows, width), jnp.bfloat16), weights)
    return traced, sum(map(_bytes, jax.tree.leaves(weights)))
