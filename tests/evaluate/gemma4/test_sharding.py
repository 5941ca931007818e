"""The same model code over a mesh: eight fake CPU devices in a process of their own.

Run as a script, this file is that process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[2] / "data"
EIGHT = "--xla_force_host_platform_device_count=8"


def small_31b() -> dict[str, Any]:
    """Sliding layers with 8 K/V heads (cut), a full one with 4 (whole on every device)."""
    raw = json.loads((DATA / "31b_config.json").read_text())
    raw["text_config"] |= {
        "hidden_size": 64, "intermediate_size": 512, "head_dim": 32, "global_head_dim": 32,
        "num_attention_heads": 8, "num_key_value_heads": 8, "num_global_key_value_heads": 4,
        "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 8, "vocab_size": 256,
    }  # fmt: skip
    return raw


def test_eight_devices_equal_one() -> None:
    done = subprocess.run(
        [sys.executable, __file__],
        env=os.environ | {"XLA_FLAGS": EIGHT, "JAX_PLATFORMS": "cpu"},
        capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["devices"] == 8
    for form in ("dense", "words", "levels", "lanes"):
        found = result[form]
        assert found["worst"] < 1e-4, form
        assert found["same_text"], form
        assert found["spread"] < 0.4, form  # of the weights' bytes on one device


def main() -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np

    from qatpack.evaluate.devices import pick_mesh
    from qatpack.evaluate.gemma4 import generate, model
    from qatpack.evaluate.gemma4.config import read_config, tensor_shapes
    from qatpack.evaluate.gemma4.lanes import to_lanes
    from qatpack.evaluate.gemma4.packed import Words, to_levels
    from qatpack.evaluate.gemma4.sharding import cut_axis, weight_sharding
    from qatpack.evaluate.gemma4.weights import assemble

    config, mesh = read_config(small_31b()), pick_mesh(0, 8)
    assert mesh is not None
    shapes, rng = tensor_shapes(config), np.random.default_rng(0)

    def random(shape: tuple[int, ...]) -> np.ndarray:
        noise = rng.standard_normal(shape).astype(np.float32)
        return 1 + 0.1 * noise if len(shape) == 1 else noise * shape[1] ** -0.5

    floats = {n: random(s) for n, s in shapes.items()}
    words = {n: rng.integers(0, 2**32, (s[0], s[1] // 8), np.uint32)
             for n, s in shapes.items() if "_proj" in n}  # fmt: skip

    def weights(form: str, sharded: bool) -> Any:
        def put(name: str, x: np.ndarray) -> jax.Array:
            where = weight_sharding(mesh, name, x.shape, config) if sharded else None
            return jax.device_put(x, where)

        def leaf(name: str) -> Any:
            if form == "dense" or name not in words:
                return put(name, floats[name])
            out, width = shapes[name]
            scale = np.full((out, width // 32), 0.2 * width**-0.5, np.float32)
            packed = Words(put(name, words[name]), put(name, scale))
            shards = 8 if sharded and cut_axis(name, config, 8) == 1 else 1
            laid = {"levels": lambda: to_levels(packed, shards), "lanes": lambda: to_lanes(packed)}
            return laid[form]() if form in laid else packed

        return assemble(config, leaf)

    tokens = jnp.asarray(rng.integers(3, 256, (2, 24)))
    positions = jnp.broadcast_to(jnp.arange(24), (2, 24))
    prompts = [list(range(40, 59)), [7, 8, 9]]

    def whole(w: Any) -> np.ndarray:
        hidden, _ = model.forward(w, tokens, positions, config=config)
        return model.logits(w, hidden, config=config)

    run = jax.jit(whole)
    result: dict[str, Any] = {"devices": len(jax.devices())}
    for form in ("dense", "words", "levels", "lanes"):
        one, many = weights(form, False), weights(form, True)
        texts = [
            generate.generate(w, prompts, config=config, max_tokens=12)[0] for w in (one, many)
        ]
        leaves = jax.tree.leaves(many)
        result[form] = {
            "worst": float(np.abs(np.asarray(run(one)) - np.asarray(run(many))).max()),
            "same_text": texts[0] == texts[1],
            "spread": sum(x.addressable_shards[0].data.nbytes for x in leaves)
            / sum(x.nbytes for x in leaves),
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
