"""Final hidden states of windows, kept on disk so that no window is run twice.

[length, hidden] a window: 1.6 MB on E2B, where its logits would take 537 MB. A file is found by
what decides its content: the weights, the decoder's code, JAX, the device (a CPU by its name: the
code that XLA makes for it differs), and the window's tokens.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..checkpoint.output import write_file, write_json
from .devices import lean_options
from .gemma4 import model
from .gemma4.config import Config
from .gemma4.load import Model
from .machine import cpu_name

AGAIN = "again"


@dataclass(frozen=True)
class Store:
    """The kept states of one model under `folder`, of dtype `dtype`."""

    folder: Path
    dtype: np.dtype[Any]

    def read(self, tokens: np.ndarray, tag: str = "") -> np.ndarray | None:
        """States [length, hidden] of a window; None where it was not run, or the file is broken."""
        try:
            raw = np.load(self._path(tokens, tag))
        except (OSError, ValueError, EOFError):
            return None
        if raw.ndim != 2 or len(raw) != len(tokens) or raw.dtype.itemsize != self.dtype.itemsize:
            return None
        return raw.view(self.dtype)

    def write(self, tokens: np.ndarray, states: np.ndarray, tag: str = "") -> None:
        """Keep the states of a window; the file appears whole or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        data = io.BytesIO()
        np.save(data, states.view(f"u{states.dtype.itemsize}"))  # npy knows no bfloat16
        write_file(self._path(tokens, tag), data.getvalue())

    def has(self, tokens: np.ndarray, tag: str = "") -> bool:
        """Whether the states of a window can be read."""
        return self.read(tokens, tag) is not None

    def _path(self, tokens: np.ndarray, tag: str) -> Path:
        digest = hashlib.sha256(np.ascontiguousarray(tokens, "<i4").tobytes()).hexdigest()[:32]
        return self.folder / f"{digest}{tag and '-'}{tag}.npy"


def open_store(
    home: Path, sha256: Mapping[str, str], *, dtype: np.dtype[Any], devices: int
) -> Store:
    """The store of a model, given by the sha256 of its files, on this machine's kind of device."""
    device = jax.devices()[0]
    key = {
        "files": dict(sorted(sha256.items())),
        "dtype": dtype.name,
        "decode": "exact",
        "code": code_version(),
        "jax": jax.__version__,
        "jaxlib": metadata.version("jaxlib"),
        "device": f"{device.platform} {device.device_kind}",
        "cpu": cpu_name() if device.platform == "cpu" else None,
        "devices": devices,
    }
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]
    folder = home / digest
    if not (folder / "key.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "key.json", key)
    return Store(folder, dtype)


@functools.cache
def code_version() -> str:
    """sha256 over the decoder's sources: other code is another model."""
    digest = hashlib.sha256()
    for path in sorted(Path(model.__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def run_window(loaded: Model, tokens: np.ndarray) -> np.ndarray:
    """Final hidden states [length, hidden] of one window, int32[length]."""
    run = _compiled(loaded.config)
    return np.asarray(run(loaded.weights, jnp.asarray(tokens)[None]))


@functools.cache
def _compiled(config: Config) -> Callable[[model.Weights, jax.Array], jax.Array]:
    def forward(weights: model.Weights, tokens: jax.Array) -> jax.Array:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        return model.forward(weights, tokens, positions, config=config)[0][0]

    return jax.jit(forward, compiler_options=lean_options())
