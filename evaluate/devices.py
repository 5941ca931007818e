"""Which devices run the model, and where compiled programs are kept."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import jax
import numpy as np

from ..checkpoint.errors import ModelError

# On a CPU XLA starts whatever is ready, and every packed weight is ready to be decoded at once:
# 4 GB of temporaries for E2B, where this takes one after another.
_LEAN = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
AXIS = "model"  # the one mesh axis: weights and heads are cut along it


def cache_home() -> Path:
    """Where qatpack keeps what it can make again: $QATPACK_CACHE, or ~/.cache/qatpack."""
    return Path(os.environ.get("QATPACK_CACHE", Path.home() / ".cache" / "qatpack"))


def use_compile_cache(folder: Path | None = None) -> Path:
    """Keep compiled programs in `folder` across runs: the same shapes then compile nothing.

    By default $QATPACK_CACHE/xla, or ~/.cache/qatpack/xla.
    """
    folder = folder or cache_home() / "xla"
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return folder


def pick_mesh(nbytes: int, count: int | None = None) -> jax.sharding.Mesh | None:
    """The devices for a model of `nbytes`: None for one device.

    Without a `count`, all devices when the model takes more than 0.8 of the first one's memory.

    Raises ModelError: more devices asked for than there are.
    """
    devices = jax.devices()
    if count is None:
        limit = (devices[0].memory_stats() or {}).get("bytes_limit")
        count = len(devices) if limit and nbytes > 0.8 * limit else 1
    if not 1 <= count <= len(devices):
        raise ModelError(f"--mesh {count}: there are {len(devices)} {devices[0].platform} devices.")
    if count == 1:
        return None
    return jax.sharding.Mesh(np.array(devices[:count]), (AXIS,))


@functools.cache
def lean_options() -> dict[str, str]:
    """Options for `jax.jit` that keep temporaries few; {} where not needed, or not known."""
    if jax.default_backend() != "cpu":
        return {}
    try:
        jax.jit(lambda x: x + 1, compiler_options=_LEAN)(0)
    except jax.errors.JaxRuntimeError:  # a JAX that does not know the option
        return {}
    return _LEAN
