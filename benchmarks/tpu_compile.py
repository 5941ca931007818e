"""Compile the decoder for a real TPU v5e on a machine without one, from shapes alone.

    python benchmarks/tpu_compile.py --config E2B --build w4a16 --batch 1 --context 4096

Needs `jax[tpu]` (libtpu is the compiler; no TPU is touched). For prefill and one 32-token decode
loop it prints whether they compile, the bytes of arguments and temporaries against a chip's 16.9
GB, and how many bytes a decode step must read, which at 819 GB/s bounds its speed from below.
Nothing here is measured on a TPU.
"""

from __future__ import annotations

import argparse
import json
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
from qatpack.evaluate.gemma4.packed import TILE, Levels
from qatpack.evaluate.gemma4.sharding import (
    cache_sharding,
    cut_axis,
    levels_sharding,
    weight_sharding,
)
from qatpack.evaluate.gemma4.weights import assemble

HBM_BYTES = 16.9e9  # what XLA gives a program on one v5e
BANDWIDTH = 819e9  # bytes/s, v5e data sheet
DATA = Path(__file__).parent.parent / "tests" / "data"
GROUP, CHUNK = 32, 32


def mesh_of(chips: int) -> Mesh:
    name, bounds = {1: ("v5e:1x1", [1, 1, 1]), 8: ("v5e:2x4", [2, 4, 1])}[chips]
    topology = topologies.get_topology_desc(
        topology_name=name, platform="tpu", chips_per_host_bounds=bounds
    )
    return Mesh(np.array(topology.devices), (AXIS,))


def weights_of(config: Config, build: str, scale_dtype: Any, mesh: Mesh) -> dict[str, Any]:
    """The model's pytree as shapes with shardings."""

    def leaf(name: str) -> Any:
        shape = tensor_shapes(config)[name]
        linear = name.endswith("_proj.weight") or "per_layer_" in name
        if build == "bf16" or not linear or len(shape) != 2 or name.startswith("embed"):
            sharding = weight_sharding(mesh, name, shape, config)
            return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)
        out, width = shape
        shards = mesh.size if cut_axis(name, config, mesh.size) == 1 else 1
        tile = math.gcd(width // shards, TILE)
        sharding = levels_sharding(mesh, name, width // tile, config)
        levels = (width // tile, tile, out)
        return Levels(
            jax.ShapeDtypeStruct(levels, jnp.int4, sharding=sharding),
            jax.ShapeDtypeStruct((levels[0], tile // GROUP, out), scale_dtype, sharding=sharding),
        )

    return assemble(config, leaf)


def state_of(config: Config, batch: int, context: int, mesh: Mesh) -> generate.State:
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


def compiled(traced: Any) -> tuple[Any, float]:
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


def step_bytes(weights: dict[str, Any], state: generate.State, chips: int) -> float:
    """Bytes one chip reads a step: all weights but tables that are only looked up, and caches."""
    read = {k: v for k, v in weights.items() if k != "embed_tokens_per_layer"}
    return sum(_bytes(x) for x in jax.tree.leaves((read, state.cache))) / chips


def _bytes(x: Any) -> float:
    return math.prod(x.shape) * (0.5 if x.dtype == jnp.int4 else x.dtype.itemsize)


def report(args: argparse.Namespace) -> dict[str, Any]:
    config = read_config(DATA / f"{args.config.lower()}_config.json")
    mesh = mesh_of(args.chips)
    whole = NamedSharding(mesh, PartitionSpec())
    weights = weights_of(config, args.build, jnp.dtype(args.scale_dtype), mesh)
    state = state_of(config, args.batch, args.context, mesh)
    ints = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32, sharding=whole)  # noqa: E731
    traces = {
        "decode": lambda: generate.decode.trace(
            weights, state, ints(), ints(3), None, config=config, chunk=CHUNK
        ),
        "prefill": lambda: generate.prefill.trace(
            weights, ints(args.batch, args.prompt), ints(args.batch), ints(3), state.key, None,
            config=config, cache_length=args.context,
        ),
    }  # fmt: skip
    result: dict[str, Any] = vars(args) | {"jax": jax.__version__}
    for name in args.only or traces:
        try:
            program, seconds = compiled(traces[name]())
        except Exception as e:  # what the compiler says is the result
            result[name] = {"compiles": False, "why": str(e)[:600]}
            continue
        result[name] = {"compiles": True, "compile_s": seconds} | memory(program)
        result[name]["fits"] = result[name]["total_bytes"] < HBM_BYTES
        if args.hlo:
            Path(args.hlo).write_text(program.as_text())
    floor = step_bytes(weights, state, args.chips)
    result["step_bytes_a_chip"] = floor
    result["step_floor_ms"] = 1e3 * floor / BANDWIDTH
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="E2B", choices=["E2B", "E4B", "12B", "31B"])
    parser.add_argument("--build", default="w4a16", choices=["bf16", "w4a16"])
    parser.add_argument("--scale-dtype", default="bfloat16")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--prompt", type=int, default=512, help="Padded prompt tokens of prefill.")
    parser.add_argument("--chips", type=int, default=1, choices=[1, 8])
    parser.add_argument("--only", action="append", choices=["decode", "prefill"])
    parser.add_argument("--hlo", help="Write the optimized HLO of the last program here.")
    result = report(parser.parse_args())
    for name in ("decode", "prefill"):
        if name in result:
            print(f"{name}: {result[name]}", file=sys.stderr)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
